// Ends a test that does not see what it must, and says what it saw.
#pragma once
#include <cstdio>
#include <cstdlib>

template <class... Numbers>
void require(bool ok, const char* what, const Numbers&... seen) {
  if (ok) return;
  std::fprintf(stderr, "%s:", what);
  (std::fprintf(stderr, " %lld", static_cast<long long>(seen)), ...);
  std::fputc('\n', stderr);
  std::abort();
}
