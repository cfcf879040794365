// What a mutant in C cannot do by itself.
extern "C" void throw_42() { throw 42; }
