#include "../rounding.cpp"
