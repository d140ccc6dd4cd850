// Spares the core while what a rank waits for is about to come: where the processor can wait for a cache line to be
// written, it does (WAITPKG of Intel's, MWAITX of AMD's, WFE of Arm's), for a bounded time; else it pauses.
//
// Such a wait gives the core's other thread, and the rest of the socket, the power that looking again and again takes,
// and ends when the line moves, not a pause later. No system call, nothing of the kernel's scheduler: other threads
// that want this core do not get it.
#pragma once
#include <cstdint>

#include "os.h"

namespace c10d_custom {

enum class Relaxing : uint8_t { kPause, kUmwait, kMwaitx, kWfe, kWfet };

// What this processor has, asked once.
Relaxing relaxing();

// Of this process: whether it waits in the deeper of the processor's states, which takes it longer to leave.
void stay_cool(bool);

namespace relax {

// Has the processor watch the line of this address; then waits until it is written, or so many cycles of the clock that
// the processor counts by are over. It may end earlier, for any reason; kWfe by the kernel's events alone, some 100 us.
void watch(Relaxing, const void* line);
void wait(Relaxing, uint32_t cycles);

}  // namespace relax

// Looks whether it is done, and if not, relaxes, at most so many cycles, while nobody writes to the line at `line`,
// which `done` reads; and looks again. How long one call takes where there is nothing but a pause: that pause, so it
// is for loops.
template <class Done>
bool relax_until(const void* line, uint32_t cycles, const Done& done, Relaxing how = relaxing()) {
  if (done()) return true;
  if (how == Relaxing::kPause) {
    cpu_relax();
  } else {
    relax::watch(how, line);
    if (done()) return true;  // what was written before it was watched would not end the wait
    relax::wait(how, cycles);
  }
  return done();
}

}  // namespace c10d_custom
