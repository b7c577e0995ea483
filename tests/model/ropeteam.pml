/* SPDX-License-Identifier: Apache-2.0
 *
 * Save, commit, lease and recovery as a model for spin. tests/model/check.py runs it. docs/testing.md ("The model")
 * shows the results. Three nodes, R = 1, a world of two ranks: rank 0 on node 0 and rank 1 on node 1.
 *
 * What stands for what:
 *
 *   proctype Coordinator   membership/coordinator.cc and agent.cc: views, removal, rejoining, leases
 *   proctype Node          one ropeteamd: core/engine/replicator.cc and holder.cc (Copy), sessions.cc and engine.cc
 *                          (Hear), leader.cc and leader_answers.cc (Commit, Pin, Answer)
 *   proctype Trouble       tests/simulation/faults.h: one partition, one loss of a node with its memory, and a
 *                          second one when every copy is there again
 *
 * The steps. Step 1 is saved and every copy of it is made, but no leader has judged it yet. Step 2 is being saved.
 * Step 0 is everything older. Both are of incarnation 1. Incarnation 2 begins when a leader chooses its pin: the
 * step that incarnation 2 restores.
 *
 * The model has no time. A lease is a bit that the coordinator gives and that may drop at any moment while its node is
 * cut off. The coordinator may remove a node that is cut off at any moment: by evidence while the bit is still set,
 * by silence after it has dropped. Both are the same transition here. A new leader waits until no instance outside
 * its view has the bit: that is View.settle_us. lease.pml shows with clocks that the bit may be taken so, and that no
 * put lands in memory that has been used again.
 *
 * Messages. A message may be late or lost: then its transition happens later or never. The leader reads the copies of
 * each member that is in its epoch directly. An inventory that is late is the same as a leader that judged earlier.
 * What the leader knew of a member that has moved on or died stays as it was: `seen`.
 *
 * The rules of the protocol that can be switched off, to see what they are for (each must make spin find an error):
 *
 *   -DNO_LEASE      no node looks at its lease
 *   -DNO_SETTLE     a new leader does not wait for the leases of those outside its view
 *   -DCOUNT_CACHE   a copy that was only fetched to be read counts for COMMITTED
 *   -DNO_QUORUM     a pin is chosen although more than R nodes are missing from the view
 *   -DEARLY_PIN     a pin is chosen although a member of the view has not answered yet
 *   -DLATE_COMMIT   a step is committed although a newer incarnation has pinned an older one
 *   -DEVICT_FORMER  a copy of a former incarnation may be evicted before a newer step is committed
 *
 * Not modelled: bytes, checksums and repair; a restart of the coordinator, or a second one; a third incarnation; more steps than two; replacements of lost
 * nodes (roster.pml); admission by rank.
 */

#define N 3
#define ALL 7 /* the set of all nodes; sets of nodes are bit masks */
#define FORGOTTEN 3 /* this arena was in incarnation 2, but its daemon does not know the pin any more */
#define NO_PIN 4    /* in the place of a pin: this node knows of no incarnation 2 */
#define BIT(n) (1 << (n))
#define HAS(set, n) (((set) & BIT(n)) != 0)
#define TWO(set) (((set) & ((set) - 1)) != 0) /* at least two members */
#define SHARD(s, r) (((s) - 1) * 2 + (r))

/* ---- the coordinator */
byte epoch = 1;        /* of the newest view */
byte members = ALL;    /* of the newest view */
byte leader;           /* of the newest view */
byte joined[N];        /* epoch since which a member has been in the view */
byte lease = ALL;      /* nodes with a valid lease */

/* ---- the world */
byte alive = ALL;
byte cut;              /* nodes that cannot reach the coordinator */
bool partitioned;
byte losses;

/* ---- the nodes */
byte at[N];            /* the epoch a node is in; 0: in none */
byte view[N];          /* its members */
byte led_by[N];        /* its leader */
byte saved[N];         /* newest step that the node's rank has saved */
byte known_pin[N];     /* of incarnation 2, as this node was told */
byte copies[4];        /* of each shard: nodes with a sealed own copy or replica */
bool cached;           /* node 2 has fetched shard 0 of step 2 to read it */
byte marked[2];        /* of each step: nodes whose copies carry the mark "committed" */

/* ---- what a leader knows and has said; n's own, empty unless n leads */
byte waits;            /* leaders that are new and have decided nothing yet */
byte seen[12];         /* of each leader and shard: departed members that reported a copy */
byte seen_marked[6];   /* of each leader and step: departed members that reported the mark */
byte heard[N];         /* departed members that have reported */
byte fresh[N];         /* those of them that have reported in this epoch */
byte announced[N];     /* newest step announced as COMMITTED */
byte released[N];      /* steps before this one were ordered released */

/* ---- what the checks remember */
byte told;             /* newest step that anybody was told is COMMITTED */
byte told_pin = NO_PIN;/* what the ranks of incarnation 2 were told to restore */
byte newest_act;       /* newest epoch in which a leader has decided something, 0 while no node is in an older one */

#define ALIVE(n) HAS(alive, n)
#define PRESENT(n) ((at[0] == at[n]) | ((at[1] == at[n]) << 1) | ((at[2] == at[n]) << 2))

#ifdef NO_LEASE
#define LEASED(n) (true)
#define SETTLED(n) (true)
#else
#define LEASED(n) HAS(lease, n)
#ifdef NO_SETTLE
#define SETTLED(n) (true)
#else
#define SETTLED(n) (!HAS(waits, n) || (lease & ~view[n]) == 0)
#endif
#endif

/* ---- the judgement of leader n: StepTable and Leader. It knows the members in its epoch as they are. */
#define MAY_DECIDE(n) (at[n] != 0 && led_by[n] == n && LEASED(n) && SETTLED(n))
#define HEARD_ALL(n) ((view[n] & ~(heard[n] | PRESENT(n))) == 0)
#define UNANSWERED(n) (view[n] & ~(fresh[n] | PRESENT(n)))
#define SEEN(n, s, r) (seen[(n) * 4 + SHARD(s, r)] | (copies[SHARD(s, r)] & PRESENT(n)))
#define CACHE_SEEN(n, s, r) ((s) == 2 && (r) == 0 && cached && at[2] == at[n] -> 4 : 0)
#define READABLE(n, s, r) (SEEN(n, s, r) | CACHE_SEEN(n, s, r))
#ifdef COUNT_CACHE
#define COUNTED(n, s, r) READABLE(n, s, r)
#else
#define COUNTED(n, s, r) SEEN(n, s, r)
#endif
#define PRODUCIBLE(n, s) (READABLE(n, s, 0) != 0 && READABLE(n, s, 1) != 0)
#define MARKED(n, s) ((seen_marked[(n) * 2 + (s) - 1] | (marked[(s) - 1] & PRESENT(n))) != 0)
#define LEAST(a, b) ((a) < (b) -> (a) : (b))
#define PIN_AT(n, m) (at[m] == at[n] -> known_pin[m] : NO_PIN)
#define SEEN_PIN(n) LEAST(PIN_AT(n, 0), LEAST(PIN_AT(n, 1), PIN_AT(n, 2)))
/* The current incarnation restores an older step, or one that no node remembers: s is abandoned. */
#ifdef LATE_COMMIT
#define ABANDONED(n, s) (false)
#else
#define ABANDONED(n, s) (SEEN_PIN(n) < (s) || SEEN_PIN(n) == FORGOTTEN)
#endif
#define COMMITTED(n, s) (MARKED(n, s) || (TWO(COUNTED(n, s, 0)) && TWO(COUNTED(n, s, 1)) && !ABANDONED(n, s)))
#ifdef NO_QUORUM
#define ENOUGH(n) (true)
#else
#define ENOUGH(n) TWO(view[n]) /* N - R */
#endif
#ifdef EARLY_PIN
#define ANSWERED(n) (UNANSWERED(n) == 0 || (!TWO(UNANSWERED(n)) && !PRODUCIBLE(n, 2) && MARKED(n, 1)))
#else
#define ANSWERED(n) (UNANSWERED(n) == 0)
#endif

/* Promise 2: the newest step that anybody was told of, or a newer one, has copies of every shard. */
#define COMPLETE(s) (copies[SHARD(s, 0)] != 0 && copies[SHARD(s, 1)] != 0)
#define KEPT (told == 0 || (told == 1 && COMPLETE(1)) || COMPLETE(2))
#define WHOLE(s) (TWO(copies[SHARD(s, 0)] & members) && TWO(copies[SHARD(s, 1)] & members))

/* Forgets the newest decision once no node is in an older epoch. It only saves states. */
inline Calm() {
  if
  :: (at[0] == 0 || at[0] >= newest_act) && (at[1] == 0 || at[1] >= newest_act) &&
     (at[2] == 0 || at[2] >= newest_act) ->
     newest_act = 0
  :: else
  fi
}
/* Node n is not the leader of anything any more. */
inline Forget(other) {
  seen[other * 4] = 0; seen[other * 4 + 1] = 0; seen[other * 4 + 2] = 0; seen[other * 4 + 3] = 0;
  seen_marked[other * 2] = 0; seen_marked[other * 2 + 1] = 0;
  heard[other] = 0; fresh[other] = 0; announced[other] = 0; released[other] = 0;
  waits = waits & ~BIT(other)
}
/* The leader keeps what member `other` has reported, which moves on. */
inline Keep(by, other) {
  i = 0;
  do
  :: i < 4 -> seen[by * 4 + i] = (seen[by * 4 + i] & ~BIT(other)) | (copies[i] & BIT(other)); i++
  :: else -> break
  od;
  i = 0;
  seen_marked[by * 2] = (seen_marked[by * 2] & ~BIT(other)) | (marked[0] & BIT(other));
  seen_marked[by * 2 + 1] = (seen_marked[by * 2 + 1] & ~BIT(other)) | (marked[1] & BIT(other));
  heard[by] = heard[by] | BIT(other); fresh[by] = fresh[by] | BIT(other);
  if :: known_pin[other] < known_pin[by] -> known_pin[by] = known_pin[other] :: else fi
}
/* The leader drops what it kept of `other`: it is here again, or no member any more. */
inline Drop(by, other) {
  i = 0;
  do
  :: i < 4 -> seen[by * 4 + i] = seen[by * 4 + i] & ~BIT(other); i++
  :: else -> break
  od;
  i = 0;
  seen_marked[by * 2] = seen_marked[by * 2] & ~BIT(other);
  seen_marked[by * 2 + 1] = seen_marked[by * 2 + 1] & ~BIT(other);
  heard[by] = heard[by] & ~BIT(other); fresh[by] = fresh[by] & ~BIT(other)
}
/* `other` leaves its epoch, for whatever reason. */
inline Leave(other) {
  if
  :: at[other] != 0 && led_by[other] != other && at[led_by[other]] == at[other] -> Keep(led_by[other], other)
  :: else
  fi
}
/* `other` is in no view any more. */
inline Out(other) {
  Leave(other);
  Forget(other);
  at[other] = 0; view[other] = 0; led_by[other] = 0;
  Calm()
}
/* ---------------------------------------------------------------- membership */

/* A view without the nodes `gone`; the leader stays, or is the member that has been there longest. */
#define REMOVE(gone) \
  :: d_step { (members & (gone)) != 0 && (members & ~(gone)) != 0 -> \
       members = members & ~(gone); epoch++; \
       if :: !HAS(members, 0) -> joined[0] = 0 :: else fi; \
       if :: !HAS(members, 1) -> joined[1] = 0 :: else fi; \
       if :: !HAS(members, 2) -> joined[2] = 0 :: else fi; \
       if \
       :: HAS(members, leader) \
       :: else -> \
          leader = N; i = 0; \
          do \
          :: i < N -> \
             if \
             :: HAS(members, i) && (leader == N || joined[i] < joined[leader]) -> leader = i \
             :: else \
             fi; \
             i++ \
          :: else -> break \
          od; \
          i = 0 \
       fi }

/* A removed node comes back as a new instance. Its arena has kept its copies; its ranks are gone. Its daemon forgets
 * the pin, but the arena knows that there was an incarnation 2. */
#define REJOIN(n) \
  :: d_step { !HAS(members, n) && ALIVE(n) && !HAS(cut, n) -> \
       Out(n); \
       saved[n] = 2; \
       if :: known_pin[n] != NO_PIN -> known_pin[n] = FORGOTTEN :: else fi; \
       members = members | BIT(n); epoch++; joined[n] = epoch; lease = lease | BIT(n); \
       at[n] = epoch; view[n] = members; led_by[n] = leader }

/* The lease of a node that the coordinator does not hear, or has removed, runs out. */
#define EXPIRE(n) \
  :: d_step { HAS(lease, n) && (HAS(cut, n) || !HAS(members, n)) -> \
       lease = lease & ~BIT(n); \
       if :: !HAS(members, n) -> Out(n) :: else fi }
#define RENEW(n) \
  :: d_step { !HAS(lease, n) && ALIVE(n) && !HAS(cut, n) && HAS(members, n) -> lease = lease | BIT(n) }

proctype Coordinator() {
  byte i;
  do
  REMOVE(cut)
  REMOVE(ALL & ~alive)
  REJOIN(0) REJOIN(1) REJOIN(2)
#ifndef NO_LEASE
  EXPIRE(0) EXPIRE(1) EXPIRE(2)
  RENEW(0) RENEW(1) RENEW(2)
#endif
  od
}

/* ---------------------------------------------------------------- trouble */

#define CUT(set) :: d_step { !partitioned -> partitioned = true; cut = set }
/* The second loss comes when the first has been noticed by every member, and the newest step that a leader has
 * announced has all its copies again. */
#define NOTICED (members == alive && (alive & ~(PRESENT(leader))) == 0 && at[leader] == epoch)
#define NEWEST (announced[0] == 2 || announced[1] == 2 || announced[2] == 2 -> 2 : told)
#define LOSE(n) \
  :: d_step { ALIVE(n) && (losses == 0 || (losses == 1 && told != 0 && TWO(alive) && NOTICED && WHOLE(NEWEST))) -> \
       losses++; \
       Out(n); \
       alive = alive & ~BIT(n); lease = lease & ~BIT(n); \
       saved[n] = 2; known_pin[n] = NO_PIN; \
       copies[0] = copies[0] & ~BIT(n); copies[1] = copies[1] & ~BIT(n); \
       copies[2] = copies[2] & ~BIT(n); copies[3] = copies[3] & ~BIT(n); \
       marked[0] = marked[0] & ~BIT(n); marked[1] = marked[1] & ~BIT(n); \
       if :: n == 2 -> cached = false :: else fi; \
       assert(KEPT) }

proctype Trouble() {
  byte i;
  do
  LOSE(0) LOSE(1) LOSE(2)
  CUT(1) CUT(2) CUT(4) CUT(3) CUT(5) CUT(6)
  :: d_step { cut != 0 -> cut = 0 }
  od
}

/* ---------------------------------------------------------------- one node */

/* Copy: node n makes a copy of a shard on t, the next node of the ring that is in the view: reserve, put, check, seal.
 * A cache there becomes the replica. The put needs the lease of n, the answer that of t. The mark goes along. */
#define COPY(s, r, t) \
  :: d_step { n != t && at[n] != 0 && at[n] == at[t] && LEASED(n) && LEASED(t) && \
       ((t) == (n + 1) % N || !HAS(view[n], (n + 1) % N)) && s >= released[led_by[n]] && \
       HAS(copies[SHARD(s, r)], n) && !HAS(copies[SHARD(s, r)], t) && !TWO(copies[SHARD(s, r)] & view[n]) -> \
       copies[SHARD(s, r)] = copies[SHARD(s, r)] | BIT(t); \
       if :: s == 2 && r == 0 && t == 2 -> cached = false :: else fi; \
       if :: HAS(marked[s - 1], n) -> marked[s - 1] = marked[s - 1] | BIT(t) :: else fi }

#define HOLDS(n, s) HAS(copies[SHARD(s, 0)] | copies[SHARD(s, 1)], n)

inline Act() { /* leader n decides something: no leader of a newer epoch has */
  assert(newest_act <= at[n]);
  newest_act = at[n];
  waits = waits & ~BIT(n);
  Calm()
}

proctype Node(byte n) {
  byte i, m;
  do
  /* A view arrives. A leader that stays keeps what it knows. */
  :: d_step { at[n] != 0 && at[n] < epoch && !HAS(cut, n) && HAS(members, n) ->
       Leave(n);
       if
       :: leader == n && led_by[n] == n ->
          m = 0;
          do
          :: m < N ->
             if :: m != n && at[m] == at[n] -> Keep(n, m) :: else fi;
             if :: !HAS(members, m) || at[m] == epoch -> Drop(n, m) :: else fi;
             m++
          :: else -> break
          od;
          m = 0;
          fresh[n] = 0
       :: leader == n && led_by[n] != n -> waits = waits | BIT(n)
       :: leader != n && led_by[n] == n -> Forget(n)
       :: else
       fi;
       at[n] = epoch; view[n] = members; led_by[n] = leader;
       if :: leader != n && at[leader] == epoch -> Drop(leader, n) :: else fi;
       Calm()
     }

  /* Its rank saves step 2. */
  :: d_step { ALIVE(n) && known_pin[n] == NO_PIN && saved[n] == 1 ->
       copies[SHARD(2, n)] = copies[SHARD(2, n)] | BIT(n);
       saved[n] = 2
     }

  COPY(1, 0, 0) COPY(1, 0, 1) COPY(1, 0, 2) COPY(1, 1, 0) COPY(1, 1, 1) COPY(1, 1, 2)
  COPY(2, 0, 0) COPY(2, 0, 1) COPY(2, 0, 2) COPY(2, 1, 0) COPY(2, 1, 1) COPY(2, 1, 2)

  /* A rank of node 2 reads shard 0 of step 2; the cache may go at any moment. */
  :: d_step { n == 2 && at[n] != 0 && !cached && !HAS(copies[SHARD(2, 0)], 2) &&
       (copies[SHARD(2, 0)] & PRESENT(n)) != 0 -> cached = true }
  :: d_step { n == 2 && cached -> cached = false }

  /* Commit: as leader it judges. */
  :: d_step { MAY_DECIDE(n) && HEARD_ALL(n) && announced[n] < 2 && COMMITTED(n, 2) ->
       Act();
       announced[n] = 2;
       if :: PRODUCIBLE(n, 2) -> released[n] = 2 :: else fi
     }
  :: d_step { MAY_DECIDE(n) && HEARD_ALL(n) && announced[n] < 1 && !COMMITTED(n, 2) && COMMITTED(n, 1) ->
       Act();
       announced[n] = 1
     }

  /* Hear: the leader's announcement arrives. The node marks its copies, tells its ranks, releases what is older. */
  :: d_step { at[n] != 0 && LEASED(n) && at[led_by[n]] == at[n] && announced[led_by[n]] != 0 &&
       (told < announced[led_by[n]] ||
        (HOLDS(n, announced[led_by[n]]) && !HAS(marked[announced[led_by[n]] - 1], n)) ||
        (released[led_by[n]] == 2 && HOLDS(n, 1))) ->
       m = announced[led_by[n]];
       if :: HOLDS(n, m) -> marked[m - 1] = marked[m - 1] | BIT(n) :: else fi;
       if
       :: told < m ->
          assert(told_pin == NO_PIN || told_pin >= m);
          told = m
       :: else
       fi;
       m = 0;
       if
       :: released[led_by[n]] == 2 ->
          copies[0] = copies[0] & ~BIT(n); copies[1] = copies[1] & ~BIT(n); marked[0] = marked[0] & ~BIT(n)
       :: else
       fi;
       assert(KEPT)
     }

  /* Pin: the first rank of incarnation 2 asks. What a former leader chose stays chosen. */
  :: d_step { MAY_DECIDE(n) && ENOUGH(n) && ANSWERED(n) &&
       known_pin[n] >= FORGOTTEN && (known_pin[n] == NO_PIN || SEEN_PIN(n) < FORGOTTEN) ->
       Act();
       if
       :: SEEN_PIN(n) != NO_PIN -> known_pin[n] = SEEN_PIN(n)
       :: else ->
          if
          :: PRODUCIBLE(n, 2) -> known_pin[n] = 2
          :: else -> if :: PRODUCIBLE(n, 1) -> known_pin[n] = 1 :: else -> known_pin[n] = 0 fi
          fi
       fi
     }
  /* A member is told the pin, and acknowledges it. */
  :: d_step { at[n] != 0 && LEASED(n) && led_by[n] != n && known_pin[n] > known_pin[led_by[n]] &&
       at[led_by[n]] == at[n] && MAY_DECIDE(led_by[n]) -> known_pin[n] = known_pin[led_by[n]] }
  /* Answer: every member knows the pin, so the ranks of incarnation 2 are told. */
  :: d_step { MAY_DECIDE(n) && ENOUGH(n) && known_pin[n] < FORGOTTEN && told_pin != known_pin[n] &&
       (!HAS(view[n], 0) || known_pin[0] == known_pin[n]) &&
       (!HAS(view[n], 1) || known_pin[1] == known_pin[n]) &&
       (!HAS(view[n], 2) || known_pin[2] == known_pin[n]) ->
       assert(told_pin == NO_PIN);
       assert(known_pin[n] >= told);
       told_pin = known_pin[n]
     }

#ifdef EVICT_FORMER
  /* Step 2 is the pin and not committed; this copy of step 1 carries no mark. */
  :: d_step { known_pin[n] == 2 && HOLDS(n, 1) && !HAS(marked[0], n) ->
       copies[0] = copies[0] & ~BIT(n); copies[1] = copies[1] & ~BIT(n);
       assert(KEPT) }
#endif
  od
}

init {
  atomic {
#ifdef LEADER
    leader = LEADER;
#else
    if :: leader = 0 :: leader = 1 :: leader = 2 fi;
#endif
    at[0] = 1; at[1] = 1; at[2] = 1;
    view[0] = ALL; view[1] = ALL; view[2] = ALL;
    led_by[0] = leader; led_by[1] = leader; led_by[2] = leader;
    known_pin[0] = NO_PIN; known_pin[1] = NO_PIN; known_pin[2] = NO_PIN;
    saved[0] = 1; saved[1] = 1; saved[2] = 2;
#ifdef EARLY_PIN
    copies[SHARD(1, 0)] = ALL; copies[SHARD(1, 1)] = ALL; /* every node has read step 1 */
#else
    copies[SHARD(1, 0)] = 3; copies[SHARD(1, 1)] = 6; /* rank 0: nodes 0 and 1; rank 1: nodes 1 and 2 */
#endif
    run Coordinator(); run Trouble(); run Node(0); run Node(1); run Node(2)
  }
}
