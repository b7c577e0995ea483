/* SPDX-License-Identifier: Apache-2.0
 *
 * Which view may choose what an incarnation restores when nodes are replaced: a model for spin. tests/model/check.py runs
 * it. docs/testing.md ("The model") shows the results. ropeteam.pml has no replacements, and shows what is taken for
 * granted here: one leader decides at a time, and every member of its view has answered.
 *
 * R = 1. Nodes 0, 1 and 2 are those that --nodes announces. Node 3 is empty and joins at any time: as a spare, or in the
 * place of a lost node, since its memory then has another identity. A node is up (in the view), away with its memory, or
 * lost with it; one node may be lost. Steps have one shard and R + 1 copies. Step 1 is told COMMITTED at the beginning.
 *
 * A roster is a set of nodes. The leader lists a complete step with its view as the roster, and every member records the
 * list. Then the step is told. A later list is newer, also one of the same step, after its copies were made again. Each
 * list has a base: the newest list of which the leader knew that it was told. A leader that finds a list which may not have
 * been told lists its step again, under a newer number and on the same base; it needs all but R nodes of that base.
 *
 *   A view may choose if at most R nodes are missing of the newest roster that a member has recorded, and, unless that
 *   list is known to be told, of its base's roster. It chooses the step of that list, or waits for its copies.
 *
 *   A list is told only when R + 1 nodes of its roster and R + 1 of its base's have recorded it. So a view that may choose
 *   by the base has a member that knows the newer list.
 *
 * Rules that can be left out; each must make spin find an error:
 *
 *   -DHEADS       a view may choose if it has all nodes that --nodes announces but R, whichever these are, and chooses the
 *                 newest step that it has
 *   -DANY_CHANGE  a list is told whoever recorded its base
 */

#define N 4
#define JOB 3   /* --nodes */
#define STEPS 2 /* the steps that are ever saved, told or not */
#define LISTS 3
#ifndef CHANGES
#define CHANGES 7 /* of who is up */
#endif
#define NOBODY N
#define BIT(n) (1 << (n))
#define HAS(set, n) (((set) & BIT(n)) != 0)
#define COUNT(s) (((s) & 1) + (((s) >> 1) & 1) + (((s) >> 2) & 1) + (((s) >> 3) & 1))
#define MAX(a, b) ((a) > (b) -> (a) : (b))

byte up = 7;
byte changes;
byte current;           /* the list that the leader of this view has made; 0: none */
byte lost;
byte copies[STEPS + 1]; /* of each step: nodes that have a copy */
byte lists = 1;
byte roster[LISTS + 1]; /* of each list */
byte step_of[LISTS + 1];
byte base[LISTS + 1];
byte recorded[N];       /* of each node: the newest list that it has recorded */
bool done[LISTS + 1];   /* of each list: it was told, and whoever recorded it knows */
byte ranks;             /* where a rank of the running incarnation is; while that node is up, the incarnation saves */
byte step = 1;          /* its newest step */
byte steps = 1;
byte told = 1;          /* the newest step that anybody was told is COMMITTED */

#define OF_UP(n) (HAS(up, n) -> recorded[n] : 0)
#define NEWEST MAX(MAX(OF_UP(0), OF_UP(1)), MAX(OF_UP(2), OF_UP(3)))
#define BY(n, l) (HAS(up, n) && recorded[n] == (l) -> BIT(n) : 0)
#define RECORDERS(l) (BY(0, l) | BY(1, l) | BY(2, l) | BY(3, l))
#define TOLD_BASE (done[NEWEST] -> NEWEST : base[NEWEST])
#define RUNS (ranks != NOBODY)
#define FEW_MISSING(l) (COUNT(roster[l] & ~up) <= 1)
#define ENOUGH_OF(l) (COUNT(roster[l] & up) >= 2) /* R + 1 */

#ifdef HEADS
#define MAY_CHOOSE (COUNT(up) >= JOB - 1)
#else
#define MAY_CHOOSE \
  (NEWEST != 0 && FEW_MISSING(NEWEST) && (done[NEWEST] || FEW_MISSING(base[NEWEST])))
#endif

#if defined(ANY_CHANGE) || defined(HEADS)
#define MAY_TELL(l) (true)
#else
#define MAY_TELL(l) (ENOUGH_OF(l) && ENOUGH_OF(base[l]))
#endif

#define HAVE(s) ((copies[s] & up) != 0)
#ifdef HEADS
#define CHOICE (HAVE(2) -> 2 : (HAVE(1) -> 1 : 0))
#define CAN_CHOOSE (true)
#else
#define CHOICE step_of[NEWEST]
#define CAN_CHOOSE HAVE(CHOICE)
#endif

#define KNOWS(n, l) (recorded[n] == l || (recorded[n] > l && !done[recorded[n]] && base[recorded[n]] == l))
/* What no node remembers. It only saves states. */
#define TIDY(l) \
  if :: !(KNOWS(0, l) || KNOWS(1, l) || KNOWS(2, l) || KNOWS(3, l)) -> roster[l] = 0; step_of[l] = 0; base[l] = 0; done[l] = false :: else fi
inline Tidy() { TIDY(1); TIDY(2); TIDY(3) }
inline NoRanks() { ranks = NOBODY; step = 0 }

#define NODE(n) \
  /* It goes away with its memory, or comes back, or joins. */ \
  :: d_step { HAS(up, n) && changes < CHANGES -> changes++; current = 0; up = up & ~BIT(n); if :: ranks == n -> NoRanks() :: else fi } \
  :: d_step { !HAS(up, n) && !HAS(lost, n) && changes < CHANGES -> changes++; current = 0; up = up | BIT(n) } \
  :: d_step { lost == 0 && changes < CHANGES -> \
       changes++; current = 0; lost = BIT(n); up = up & ~BIT(n); \
       copies[1] = copies[1] & ~BIT(n); copies[2] = copies[2] & ~BIT(n); \
       recorded[n] = 0; \
       if :: ranks == n -> NoRanks() :: else fi; \
       Tidy() } \
  /* The ranks of a new incarnation ask what to restore; one of them is here. */ \
  :: d_step { !RUNS && HAS(up, n) && MAY_CHOOSE && CAN_CHOOSE -> \
       step = CHOICE; ranks = n; \
       assert(step >= told) } \
  /* They save a step; this node takes the copy. */ \
  :: d_step { RUNS && ranks != n && HAS(up, n) && step == told && steps < STEPS -> \
       steps++; step = steps; copies[step] = BIT(n) | BIT(ranks) } \
  /* A copy is made where one is missing. */ \
  :: d_step { RUNS && HAS(up, n) && COUNT(copies[step] & up) == 1 && !HAS(copies[step], n) -> \
       copies[step] = copies[step] | BIT(n) } \
  /* The member records the list. */ \
  :: d_step { HAS(up, n) && recorded[n] < NEWEST -> recorded[n] = NEWEST; Tidy() }

active proctype World() {
  d_step {
    copies[1] = 3; roster[1] = 7; step_of[1] = 1; base[1] = 1; ranks = 0; done[1] = true;
    recorded[0] = 1; recorded[1] = 1; recorded[2] = 1
  }
  do
  NODE(0) NODE(1) NODE(2) NODE(3)
  /* The leader, which is with the rank, lists the step with its view. What a former leader has listed and may not have
   * told, it lists again under a newer number. */
  :: d_step { RUNS && lists < LISTS && COUNT(copies[step] & up) >= 2 && recorded[ranks] == NEWEST && current == 0 &&
       step >= step_of[NEWEST] && FEW_MISSING(TOLD_BASE) && (!done[NEWEST] || step_of[NEWEST] != step || roster[NEWEST] != up) ->
       lists++;
       roster[lists] = up; step_of[lists] = step; base[lists] = TOLD_BASE;
       recorded[ranks] = lists; current = lists; Tidy() }
  :: d_step { RUNS && current != 0 && recorded[ranks] == current && !done[current] &&
       (up & ~RECORDERS(current)) == 0 && MAY_TELL(current) ->
       done[current] = true; current = 0;
       if
       :: told < step_of[recorded[ranks]] ->
          told = step_of[recorded[ranks]];
#ifndef HEADS
          copies[1] = copies[1] & ~up /* released */
#endif
       :: else
       fi }
  od
}
