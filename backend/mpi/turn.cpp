#include "turn.h"

using namespace c10d_custom;

uint64_t c10d_turn_last(const Turn* t) { return t->last(); }
uint64_t c10d_turn_take(Turn* t) { return t->take(); }
uint64_t c10d_turn_wait(Turn* t) { return t->wait(); }
int c10d_turn_next(Turn* t) { return t->next(); }
int c10d_turn_taken(const Turn* t) { return t->taken(); }
int c10d_turn_free(Turn* t) { return t->free(); }
void c10d_turn_close(Turn* t) { t->close(); }
