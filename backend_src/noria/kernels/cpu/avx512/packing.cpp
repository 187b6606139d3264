#include "../packing.cpp"
