// How a process ends its part in an MPI job, by the code that it exits with: Python tells that to none of its exit
// handlers, libc's on_exit does.
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../shm/api.h"

// What MPI_Finalize tells Hydra (PMI-1), without its wait for all ranks, one that may never come there among them.
C10D_API void c10d_tell_hydra(int32_t launcher) {
  constexpr int kPatienceMs = 2000;  // for the launcher on this host to answer
  const char word[] = "cmd=finalize\n";
  char answer[1024];
  pollfd heard = {launcher, POLLIN, 0};
  if (write(launcher, word, strlen(word)) > 0 && poll(&heard, 1, kPatienceMs) > 0) {
    if (read(launcher, answer, sizeof answer) < 0) return;
  }
}

// The same by PMIx, once for each PMIx_Init; null: there is no PMIx.
C10D_API void c10d_tell_pmix(int (*initialized)(), int (*finalize)(const void*, size_t)) {
  while (initialized && initialized() && !finalize(nullptr, 0)) continue;
}

namespace {

// MPI's functions. Its handles are ints or pointers, and either passes for an intptr_t.
struct Job {
  int (*finalize)();
  int (*abort)(intptr_t, int);
  int (*finalized)(int*);
  int (*ibarrier)(intptr_t, intptr_t*);
  int (*test)(intptr_t*, int*, void*);
  int (*failed)(intptr_t, intptr_t*);  // the ranks known to have failed; null: this MPI does not tell
  int (*group_size)(intptr_t, int*);
  int (*group_free)(intptr_t*);
  int (*pmix_initialized)();
  int (*pmix_finalize)(const void*, size_t);
  int64_t world;
  int64_t forward_ns;  // for the launcher to forward what was written, before MPI_Abort ends it too
  int64_t launcher;    // Hydra's end of the process; -1: another launcher, and MPI_Finalize
} job;
pid_t pid;

bool one_has_failed() {
  intptr_t group = 0;
  int size = 0;
  if (!job.failed || job.failed(job.world, &group)) return false;
  job.group_size(group, &size);
  job.group_free(&group);
  return size > 0;
}

// Until all ranks are here; false: one never will be. MPI_Finalize waits as long, and for those as well.
bool all_are_here() {
  constexpr timespec kPause = {0, 1000000};
  intptr_t barrier = 0;
  int done = 0;
  alignas(16) char status[256];
  if (job.ibarrier(job.world, &barrier)) return false;
  for (;;) {
    if (job.test(&barrier, &done, status)) return false;
    if (done) return true;
    if (one_has_failed()) return false;
    nanosleep(&kPause, nullptr);
  }
}

void end(int status, void*) {
  int over = 1;
  if (getpid() != pid || job.finalized(&over) || over) return;
  if (status == 0) {
    if (job.launcher >= 0) return c10d_tell_hydra(int32_t(job.launcher));
    return all_are_here() ? void(job.finalize()) : c10d_tell_pmix(job.pmix_initialized, job.pmix_finalize);
  }
  timespec left = {job.forward_ns / 1000000000, job.forward_ns % 1000000000};
  while (nanosleep(&left, &left)) continue;
  job.abort(job.world, status & 255);
}

}  // namespace

// Called as the interpreter ends, with a Job. Handlers that libc has been given before run after this one.
C10D_API void c10d_end_mpi_at_exit(const void* how) {
  memcpy(&job, how, sizeof job);
  if (pid != getpid()) on_exit(end, nullptr);
  pid = getpid();
}
