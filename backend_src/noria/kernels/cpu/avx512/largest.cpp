#include "../largest.cpp"
