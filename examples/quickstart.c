/* SPDX-License-Identifier: Apache-2.0 */
/* cc quickstart.c -lropeteam -o quickstart && RANK=0 WORLD_SIZE=1 ropeteam run -- ./quickstart */
#include <ropeteam/ropeteam.h>
#include <stdio.h>

int main(void) {
  double weights[1000] = {0};
  ropeteam_open_options_t options = {.size = sizeof options, .rank = ROPETEAM_RANK_FROM_ENV};
  ropeteam_save_options_t need = {.size = sizeof need, .bytes = sizeof weights, .objects = 1};
  ropeteam_step_t last = {.size = sizeof last};
  ropeteam_t* rope = NULL;
  ropeteam_view_t* view = NULL;
  if (ropeteam_open(&options, &rope) != ROPETEAM_OK) return fprintf(stderr, "%s\n", ropeteam_last_error()), 1;
  ropeteam_status_t found = ropeteam_latest(rope, &last, 10000);
  if (found != ROPETEAM_NOT_FOUND && /* a step is saved: continue from rank 0's shard, or end */
      (found != ROPETEAM_OK || ropeteam_view_open(rope, last.step, 0, 10000, &view) != ROPETEAM_OK ||
       ropeteam_view_read(view, "weights", 0, weights, sizeof weights, 10000) != ROPETEAM_OK))
    return fprintf(stderr, "step %lu is not restored: %s\n", (unsigned long)last.step, ropeteam_last_error()),
           1;
  ropeteam_view_close(view);
  for (uint64_t step = last.step + 1; step <= last.step + 3; step++) {
    ropeteam_save_t* save = NULL;
    weights[0] += 0.5; /* a training step */
    if (ropeteam_save_begin(rope, step, &need, &save) != ROPETEAM_OK ||
        ropeteam_save_put(save, "weights", weights, sizeof weights) != ROPETEAM_OK ||
        ropeteam_save_commit(save) != ROPETEAM_OK ||
        ropeteam_wait(rope, step, ROPETEAM_COMMITTED, 10000) != ROPETEAM_OK) /* training continues */
      fprintf(stderr, "step %lu is not safe: %s\n", (unsigned long)step, ropeteam_last_error());
    ropeteam_save_close(save);
  }
  printf("went on from step %lu, weights[0] is now %g\n", (unsigned long)last.step, weights[0]);
  ropeteam_close(rope);
}
