#include "sequencer.h"

using namespace c10d_custom;

uint64_t c10d_sequencer_last(const Sequencer* t) { return t->last(); }
uint64_t c10d_sequencer_take(Sequencer* t) { return t->take(); }
uint64_t c10d_sequencer_wait(Sequencer* t) { return t->wait(); }
uint64_t c10d_sequencer_next(Sequencer* t) { return t->next(); }
uint64_t c10d_sequencer_under_way(const Sequencer* t) { return t->under_way(); }
int c10d_sequencer_free(Sequencer* t) { return t->free(); }
void c10d_sequencer_close(Sequencer* t) { t->close(); }
