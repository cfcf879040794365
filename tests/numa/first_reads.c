// Which thread is the first to touch each page of memory, and on which CPU: pages are taken away,
// and whoever faults gets the page back and is written down.
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_RANGES = 64, MOST_TOUCHES = 1 << 18, PAGE = 4096 };

struct touch {
  uint64_t page;
  int32_t thread, cpu;
};

static struct {
  uintptr_t begin, end;
} ranges[MOST_RANGES];
static int num_ranges;
static struct touch touches[MOST_TOUCHES];
static atomic_size_t num_touches;
static struct sigaction before;

static void on_fault(int signal, siginfo_t* info, void* context) {
  (void)context;
  const uintptr_t at = (uintptr_t)info->si_addr;
  for (int i = 0; i < num_ranges; ++i) {
    if (at < ranges[i].begin || at >= ranges[i].end) continue;
    const uintptr_t page = at / PAGE * PAGE;
    const size_t next = atomic_fetch_add(&num_touches, 1);
    if (next < MOST_TOUCHES) {
      touches[next] = (struct touch){page, (int32_t)syscall(SYS_gettid), sched_getcpu()};
    }
    mprotect((void*)page, PAGE, PROT_READ | PROT_WRITE);
    return;
  }
  sigaction(signal, &before, NULL);  // a fault that is none of ours happens once more
}

// Takes `count` ranges of whole pages away, and forgets what was written down.
int watch(const uint64_t* begins, const uint64_t* ends, int count) {
  if (count > MOST_RANGES) return -1;
  num_ranges = count;
  num_touches = 0;
  const struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
  if (sigaction(SIGSEGV, &action, &before) != 0) return -1;
  for (int i = 0; i < count; ++i) {
    ranges[i].begin = begins[i];
    ranges[i].end = ends[i];
    if (mprotect((void*)begins[i], ends[i] - begins[i], PROT_NONE) != 0) return -1;
  }
  return 0;
}

// Gives all pages back. Returns how many touches there were; `all` is where they are.
size_t unwatch(const struct touch** all) {
  for (int i = 0; i < num_ranges; ++i) {
    mprotect((void*)ranges[i].begin, ranges[i].end - ranges[i].begin, PROT_READ | PROT_WRITE);
  }
  num_ranges = 0;
  sigaction(SIGSEGV, &before, NULL);
  *all = touches;
  return num_touches;
}
