/* SPDX-License-Identifier: Apache-2.0
 *
 * The clocks behind a lease as a model for spin. tests/model/check.py runs it. docs/testing.md ("The model") shows the
 * results. ropeteam.pml has no clocks: it takes for granted what is shown here.
 *
 *   proctype Source        a node that leads and puts chunks: membership/agent.cc (its lease), replicator.cc
 *   proctype Coordinator   membership/coordinator.cc: hears heartbeats, removes the source by silence or by evidence
 *   proctype Successor     the next leader, and the holder of the source's chunks: core/engine/leader.cc, holder.cc,
 *                          memory.cc (quarantine)
 *   proctype Time          one tick for every clock; the clock of the source may be slow
 *
 * A tick is about a quarter of a second. The heartbeat, its answer and the view may each take any time.
 *
 *   -DNO_LEASE          the source does not look at its lease
 *   -DLONG_LEASE        the lease is as long as dead_after
 *   -DFROM_ANSWER       the lease is counted from the arrival of the answer, not from when the heartbeat was sent
 *   -DNO_SETTLE         the successor does not wait for the source's lease
 *   -DSHORT_QUARANTINE  the holder uses the chunks again as soon as the source's lease may have ended
 *   -DPAUSED            the source may be stopped between its look at the lease and the put
 *   -DFOLLOWER          the source leads nothing, it only puts
 *   -DFENCE             the fabric fences: once the holder has disconnected the source, nothing lands
 *
 * PAUSED without FENCE must fail: no clock protects from that, only a fabric that fences.
 */

#define DRIFT 1 /* ticks that the source's clock may lose within one lease */
#define DEAD_AFTER 4
#ifdef LONG_LEASE
#define LEASE 4
#else
#define LEASE 2 /* LEASE + DRIFT < DEAD_AFTER */
#endif
#define DELIVERY 2 /* ticks that a put which has left may take to land */
#ifdef SHORT_QUARANTINE
#define QUARANTINE (LEASE + DRIFT - 1)
#else
#define QUARANTINE (LEASE + DRIFT + DELIVERY)
#endif

#define NOWHERE 0
#define TO_COORDINATOR 1
#define TO_SOURCE 2

byte heartbeat;        /* where it is */
byte age;              /* ticks since it was sent, on the source's clock */
byte lease = LEASE;    /* ticks left, on the source's clock */
byte slow;             /* ticks that the source's clock has lost since the lease was renewed */
byte lost_by_age;      /* those that it has lost since the heartbeat was sent */
byte silent;           /* ticks since the coordinator heard the source */
bool member = true;
bool view_sent;        /* of the view without the source */
byte settle_sent;      /* in it: View.settle_us */
bool view_come;
byte settle;
byte quarantine;
bool decided;          /* the successor has decided something */
bool reused;           /* the source's chunks hold another shard now */
bool looked;           /* the source has found its lease valid and is about to put */
bool flying;
byte flight;           /* ticks that the put may still take */

#ifdef NO_LEASE
#define LEASED true
#else
#define LEASED (lease > 0)
#endif

proctype Source() {
  do
  :: d_step { heartbeat == NOWHERE && member -> heartbeat = TO_COORDINATOR; age = 0; lost_by_age = 0 }
  :: d_step { heartbeat == TO_SOURCE ->
       heartbeat = NOWHERE;
#ifdef FROM_ANSWER
       lease = LEASE; slow = 0;
#else
       if
       :: age < LEASE && LEASE - age > lease -> lease = LEASE - age; slow = lost_by_age
       :: else
       fi;
#endif
       age = 0; lost_by_age = 0 }
#ifndef FOLLOWER
  :: d_step { LEASED -> assert(!decided) } /* as leader it announces */
#endif
  :: d_step { LEASED && !flying && !looked -> looked = true }
  :: d_step { looked && !flying -> looked = false; flying = true; flight = DELIVERY }
#ifdef FENCE
  :: d_step { flying && view_come -> flying = false; flight = 0 } /* the holder has closed the connection */
#endif
  :: d_step { flying ->
       flying = false; flight = 0;
#ifdef FENCE
       assert(view_come || !reused)
#else
       assert(!reused)
#endif
     }
  od
}

proctype Coordinator() {
  do
  :: d_step { heartbeat == TO_COORDINATOR ->
       if
       :: member -> silent = 0; heartbeat = TO_SOURCE
       :: else -> heartbeat = NOWHERE; age = 0; lost_by_age = 0
       fi }
  :: d_step { heartbeat != NOWHERE -> heartbeat = NOWHERE; age = 0; lost_by_age = 0 } /* lost */
  /* By silence, and by evidence: then the view says how long the lease may still last. */
  :: d_step { member && silent >= DEAD_AFTER -> member = false; view_sent = true }
  :: d_step { member -> member = false; view_sent = true;
       if :: silent < LEASE + DRIFT -> settle_sent = LEASE + DRIFT - silent :: else fi }
  od
}

proctype Successor() {
  do
  :: d_step { view_sent && !view_come ->
       view_come = true; settle = settle_sent; settle_sent = 0; quarantine = QUARANTINE }
#ifdef NO_SETTLE
  :: d_step { view_come && !decided -> decided = true }
#else
  :: d_step { view_come && settle == 0 && !decided -> decided = true }
#endif
#ifdef FENCE
  :: d_step { view_come && !reused -> reused = true }
#else
  :: d_step { view_come && quarantine == 0 && !reused -> reused = true }
#endif
  od
}

#define STEP_DOWN(timer) if :: timer > 0 -> timer-- :: else fi
#ifdef PAUSED
#define MAY_TICK (!flying || flight > 0)
#else
#define MAY_TICK ((!flying || flight > 0) && !looked) /* the look and the put are within one tick */
#endif

proctype Time() {
  do
  :: d_step { MAY_TICK ->
       STEP_DOWN(lease);
       if :: heartbeat != NOWHERE && age < LEASE -> age++ :: else fi;
       if :: member && silent < DEAD_AFTER -> silent++ :: else fi;
       STEP_DOWN(settle); STEP_DOWN(quarantine); STEP_DOWN(flight) }
  /* The source's clock stands still for this tick. */
  :: d_step { MAY_TICK && slow < DRIFT && lost_by_age < DRIFT ->
       slow++;
       if :: heartbeat != NOWHERE -> lost_by_age++ :: else fi;
       if :: member && silent < DEAD_AFTER -> silent++ :: else fi;
       STEP_DOWN(settle); STEP_DOWN(quarantine); STEP_DOWN(flight) }
  od
}

init { atomic { run Source(); run Coordinator(); run Successor(); run Time() } }
