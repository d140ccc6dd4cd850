// The threads of this process that its groups work with while their callers do something else. A group has one for as
// long as there is something to do: so their number follows what goes on at once, not how many groups there are.
//
// One that nobody needs ends after a while. They take no signals, and are not there in a forked child, which has its
// own. A thread inherits the affinity mask of the one that had it started.
#pragma once

namespace c10d_custom {

// Has errand(context) run in one of them at once, started for it if none is idle. 0, or errno: the system gives no
// more. Whoever lends sees to it that the errand ends before `context` does.
int lend_thread(void (*errand)(void*), void* context);

}  // namespace c10d_custom
