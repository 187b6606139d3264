#include "../decoder.cpp"
