// Tickets as results: of what the C ABI puts where it is told.
#pragma once
#include "api.h"

inline c10d_ticket* c10d_submit(c10d_handle* h, const c10d_custom::CallArgs* a) {
  c10d_ticket* ticket;
  c10d_submit(h, a, &ticket);
  return ticket;
}

inline c10d_ticket* c10d_post(c10d_handle* h, const c10d_custom::MessageArgs* a) {
  c10d_ticket* ticket;
  c10d_post(h, a, &ticket);
  return ticket;
}
