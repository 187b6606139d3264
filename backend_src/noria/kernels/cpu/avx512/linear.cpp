#include "../linear.cpp"
