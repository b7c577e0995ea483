/* SPDX-License-Identifier: Apache-2.0
 *
 * The coordinator role in etcd as a model for spin: a lease that a former coordinator granted has ended before its
 * successor acts, whenever the successor claims the role and however late each message is. tests/model/check.py runs it.
 *
 *   proctype Holder      the coordinator that has the role: membership/etcd/seat.cc (confirmations), Coordinator::LeaseNow()
 *   proctype Node        a member: membership/agent.cc (its lease)
 *   proctype Successor   claims the role at any time, and waits: Coordinator, Inheritance::term_us
 *   proctype Etcd        answers a confirmation by what the record is at that moment
 *   proctype Time        one tick for every clock; that of the holder or of the node may be slow
 *
 * A tick is about a third of a second.
 *
 *   -DNO_TERM      the holder grants leases without looking at its confirmation
 *   -DWHOLE_LEASE  a lease may outlast the confirmation
 *   -DFROM_ANSWER  a confirmation counts from the arrival of the answer, not from its sending
 *   -DNO_WAIT      the successor does not wait for its predecessor's term
 *   -DSTALE_READ   a member of etcd that is behind may answer a confirmation
 */

#define DRIFT 1 /* ticks that the two clocks may lose, together, within a term */
#define TERM 3  /* of a confirmation */
#define LEASE 2

#define NOWHERE 0
#define TO_ETCD 1
#define TO_HOLDER 2
#define TO_NODE 3

byte confirmation;     /* where it is */
bool confirms;         /* its answer */
byte confirmation_age; /* ticks since it was sent, on the holder's clock */
byte confirmed = TERM; /* ticks left, on the holder's clock */
byte heartbeat;        /* where it is */
byte heartbeat_age;    /* ticks since it was sent, on the node's clock */
byte granted;          /* in its answer */
byte lease;            /* ticks left, on the node's clock */
byte slow;             /* ticks that clocks have lost */
bool claimed;          /* the role is the successor's */
byte wait;             /* ticks until the successor acts */
bool decided;          /* it has acted */

#ifdef NO_TERM
#define GRANT LEASE
#else
#ifdef WHOLE_LEASE
#define GRANT (confirmed > 0 -> LEASE : 0)
#else
#define GRANT (confirmed < LEASE -> confirmed : LEASE)
#endif
#endif

proctype Holder() {
  do
  :: d_step { confirmation == NOWHERE -> confirmation = TO_ETCD; confirmation_age = 0 }
  :: d_step { confirmation == TO_HOLDER ->
       confirmation = NOWHERE;
       if
#ifdef FROM_ANSWER
       :: confirms -> confirmed = TERM
#else
       :: confirms && TERM - confirmation_age > confirmed -> confirmed = TERM - confirmation_age
#endif
       :: else
       fi;
       confirms = false; confirmation_age = 0 }
  :: d_step { heartbeat == TO_HOLDER -> heartbeat = TO_NODE; granted = GRANT }
  od
}

proctype Etcd() {
  do
#ifdef STALE_READ
  :: d_step { confirmation == TO_ETCD -> confirmation = TO_HOLDER; confirms = true }
#else
  :: d_step { confirmation == TO_ETCD -> confirmation = TO_HOLDER; confirms = !claimed }
#endif
  :: d_step { confirmation != NOWHERE -> confirmation = NOWHERE; confirms = false; confirmation_age = 0 } /* lost */
  od
}

proctype Node() {
  do
  :: d_step { heartbeat == NOWHERE -> heartbeat = TO_HOLDER; heartbeat_age = 0 }
  :: d_step { heartbeat == TO_NODE ->
       heartbeat = NOWHERE;
       if :: granted > heartbeat_age && granted - heartbeat_age > lease -> lease = granted - heartbeat_age :: else fi;
       granted = 0; heartbeat_age = 0 }
  :: d_step { heartbeat != NOWHERE -> heartbeat = NOWHERE; granted = 0; heartbeat_age = 0 } /* lost */
  :: d_step { lease > 0 -> assert(!decided) } /* it acts */
  od
}

proctype Successor() {
#ifdef NO_WAIT
  d_step { claimed = true; wait = 0 };
#else
  d_step { claimed = true; wait = TERM + DRIFT };
#endif
  d_step { wait == 0 -> decided = true }
}

#define STEP_DOWN(timer) if :: timer > 0 -> timer-- :: else fi
#define HOLDERS_CLOCK \
  STEP_DOWN(confirmed); if :: confirmation != NOWHERE && confirmation_age < TERM -> confirmation_age++ :: else fi
#define NODES_CLOCK \
  STEP_DOWN(lease); if :: heartbeat != NOWHERE && heartbeat_age < LEASE -> heartbeat_age++ :: else fi

proctype Time() {
  do
  :: d_step { HOLDERS_CLOCK; NODES_CLOCK; STEP_DOWN(wait) }
  :: d_step { slow < DRIFT -> slow++; HOLDERS_CLOCK; STEP_DOWN(wait) }
  :: d_step { slow < DRIFT -> slow++; NODES_CLOCK; STEP_DOWN(wait) }
  od
}

init { atomic { run Holder(); run Etcd(); run Node(); run Successor(); run Time() } }
