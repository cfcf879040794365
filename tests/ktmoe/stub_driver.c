/* Stands for libcuda.so.1 where there is no GPU: the functions that ktk calls, and those that a
 * test needs to make streams and graphs.
 *
 * A stream is a first-in-first-out queue with a thread of its own. While it is captured, work goes
 * to a graph instead; launching the graph queues all of it again. As with the driver, a host
 * function may call nothing here, and waiting for a stream that is captured is an error.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  INVALID_CONTEXT = 201,
  NOT_PERMITTED = 800,
  STREAM_CAPTURE_UNSUPPORTED = 900
};

typedef void (*host_function)(void*);

typedef struct work {
  host_function run;
  void* argument;
  struct work* next;
} work;

typedef struct queue {
  work *first, **last;
} queue;

typedef struct stream {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  pthread_t thread;
  queue pending, captured;
  int busy, stopping, capturing;
} stream;

static __thread int in_host_function;
static __thread void* current_context;
static int the_context;
static int next_launch_fails;

static void queue_init(queue* q) {
  q->first = NULL;
  q->last = &q->first;
}

static void queue_add(queue* q, host_function run, void* argument) {
  work* w = malloc(sizeof *w);
  w->run = run;
  w->argument = argument;
  w->next = NULL;
  *q->last = w;
  q->last = &w->next;
}

static work* queue_take(queue* q) {
  work* w = q->first;
  q->first = w->next;
  if (!q->first) q->last = &q->first;
  return w;
}

static void* serve(void* argument) {
  stream* s = argument;
  pthread_mutex_lock(&s->mutex);
  for (;;) {
    while (!s->pending.first && !s->stopping) pthread_cond_wait(&s->changed, &s->mutex);
    if (!s->pending.first) break;
    work* w = queue_take(&s->pending);
    s->busy = 1;
    pthread_mutex_unlock(&s->mutex);
    in_host_function = 1;
    w->run(w->argument);
    in_host_function = 0;
    free(w);
    pthread_mutex_lock(&s->mutex);
    s->busy = 0;
    pthread_cond_broadcast(&s->changed);
  }
  pthread_mutex_unlock(&s->mutex);
  return NULL;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }

int cuGetErrorString(int code, const char** text) {
  switch (code) {
    case SUCCESS:
      *text = "no error";
      return SUCCESS;
    case INVALID_VALUE:
      *text = "invalid argument";
      return SUCCESS;
    case INVALID_CONTEXT:
      *text = "invalid device context";
      return SUCCESS;
    case NOT_PERMITTED:
      *text = "operation not permitted";
      return SUCCESS;
    case STREAM_CAPTURE_UNSUPPORTED:
      *text = "operation not permitted when stream is capturing";
      return SUCCESS;
    default:
      *text = NULL;
      return INVALID_VALUE;
  }
}

int cuStreamGetCtx(void* handle, void** context) {
  if (in_host_function) return NOT_PERMITTED;
  if (!handle) return INVALID_VALUE;
  *context = &the_context;
  return SUCCESS;
}

int cuCtxPushCurrent_v2(void* context) {
  current_context = context;
  return SUCCESS;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = current_context;
  current_context = NULL;
  return SUCCESS;
}

int cuStreamIsCapturing(void* handle, int* status) {
  if (in_host_function) return NOT_PERMITTED;
  stream* s = handle;
  pthread_mutex_lock(&s->mutex);
  *status = s->capturing;
  pthread_mutex_unlock(&s->mutex);
  return SUCCESS;
}

int cuLaunchHostFunc(void* handle, host_function run, void* argument) {
  if (in_host_function) return NOT_PERMITTED;
  if (!current_context) return INVALID_CONTEXT;
  if (!run || next_launch_fails) {
    next_launch_fails = 0;
    return INVALID_VALUE;
  }
  stream* s = handle;
  pthread_mutex_lock(&s->mutex);
  queue_add(s->capturing ? &s->captured : &s->pending, run, argument);
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->mutex);
  return SUCCESS;
}

/* --- for tests ------------------------------------------------------------------------------- */

stream* stub_stream(void) {
  stream* s = calloc(1, sizeof *s);
  pthread_mutex_init(&s->mutex, NULL);
  pthread_cond_init(&s->changed, NULL);
  queue_init(&s->pending);
  queue_init(&s->captured);
  pthread_create(&s->thread, NULL, serve, s);
  return s;
}

void stub_launch(stream* s, host_function run) {
  pthread_mutex_lock(&s->mutex);
  queue_add(&s->pending, run, NULL);
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->mutex);
}

int stub_synchronize(stream* s) {
  if (in_host_function) return NOT_PERMITTED;
  pthread_mutex_lock(&s->mutex);
  const int capturing = s->capturing;
  while (!capturing && (s->pending.first || s->busy)) pthread_cond_wait(&s->changed, &s->mutex);
  pthread_mutex_unlock(&s->mutex);
  return capturing ? STREAM_CAPTURE_UNSUPPORTED : SUCCESS;
}

void stub_begin_capture(stream* s) {
  pthread_mutex_lock(&s->mutex);
  s->capturing = 1;
  pthread_mutex_unlock(&s->mutex);
}

/* The graph: a queue that is never emptied. */
queue* stub_end_capture(stream* s) {
  queue* graph = malloc(sizeof *graph);
  pthread_mutex_lock(&s->mutex);
  s->capturing = 0;
  graph->first = s->captured.first;
  queue_init(&s->captured);
  pthread_mutex_unlock(&s->mutex);
  return graph;
}

int stub_replay(const queue* graph, stream* s) {
  pthread_mutex_lock(&s->mutex);
  for (const work* w = graph->first; w; w = w->next) queue_add(&s->pending, w->run, w->argument);
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->mutex);
  return SUCCESS;
}

void stub_destroy_graph(queue* graph) {
  while (graph->first) {
    work* next = graph->first->next;
    free(graph->first);
    graph->first = next;
  }
  free(graph);
}

void stub_destroy(stream* s) {
  pthread_mutex_lock(&s->mutex);
  s->stopping = 1;
  pthread_cond_broadcast(&s->changed);
  pthread_mutex_unlock(&s->mutex);
  pthread_join(s->thread, NULL);
  free(s);
}

void stub_fail_next_launch(void) { next_launch_fails = 1; }
