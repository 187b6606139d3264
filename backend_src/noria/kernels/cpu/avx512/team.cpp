#include "../team.cpp"
