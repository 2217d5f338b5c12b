/* Runs stages of compiled loops on memory at a fixed place: by `lead`, with one thread more that does `work`. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

void lead(void *shared, void *stages, int64_t count);
void work(void *shared, int64_t index);
extern void *const functions[];

enum { ALLOWED = 208, STOP = 200, MUTEX = 256, WAKE = 384 };

static void *worker(void *shared) {
    work(shared, 1);
    return 0;
}

static void need(int holds) {
    if (!holds) exit(3);
}

int main(void) {
    int64_t head[8]; /* base, bytes, stages: where, how many; words of a stage; shared: where; threads; runs */
    need(fread(head, sizeof head, 1, stdin) == 1);
    char *base = mmap((void *)head[0], head[1], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    need(base == (char *)head[0]);
    need(fread(base, head[1], 1, stdin) == 1);
    int64_t *stages = (int64_t *)head[2];
    for (int64_t stage = 0; stage < head[3]; stage++) {
        int64_t *function = &stages[stage * head[4] + 1];
        *function = (int64_t)functions[*function];
    }
    char *shared = (char *)head[5];
    *(int64_t *)(shared + ALLOWED) = head[6];
    pthread_t thread;
    if (head[6] > 1) need(pthread_create(&thread, 0, worker, shared) == 0);
    for (int64_t run = 0; run < head[7]; run++) lead(shared, stages, head[3]);
    if (head[6] > 1) {
        *(volatile int64_t *)(shared + STOP) = 1;
        pthread_mutex_lock((pthread_mutex_t *)(shared + MUTEX));
        pthread_cond_broadcast((pthread_cond_t *)(shared + WAKE));
        pthread_mutex_unlock((pthread_mutex_t *)(shared + MUTEX));
        need(pthread_join(thread, 0) == 0);
    }
    need(fwrite(base, head[1], 1, stdout) == 1);
    return 0;
}
