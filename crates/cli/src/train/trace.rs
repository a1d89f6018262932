//! The Chrome trace of one step, for `chrome://tracing` and Perfetto. Each rank is a process with a row for
//! computation, a row for communication, and curves of its memory.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_fsdp::internals::collectives::{CommSpan, CommStage};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::host;

/// Row of a rank's computation; the next row is for its communication.
const COMPUTE: usize = 0;
const COMMUNICATION: usize = 1;

/// Curve of the memory of a whole process, which thread ranks share.
const RESIDENT: &str = "resident bytes of the process";

/// The recorded phases of a step of the eager engine; `None` while nothing is recorded.
#[derive(Debug, Default)]
pub(crate) struct Phases(RefCell<Option<Vec<Phase>>>);

/// One phase of a step: forward, backward or optimizer.
#[derive(Debug, Clone)]
pub(crate) struct Phase {
    name: &'static str,
    start: Instant,
    end: Instant,
}

impl Phases {
    /// Starts a recording.
    pub(crate) fn begin(&self) {
        self.0.replace(Some(Vec::new()));
    }

    /// Ends the recording and returns it.
    pub(crate) fn end(&self) -> Vec<Phase> {
        self.0.take().unwrap_or_default()
    }

    /// Records a phase that ends now, if a recording is active.
    pub(crate) fn add(&self, name: &'static str, start: Instant) {
        if let Some(phases) = &mut *self.0.borrow_mut() {
            phases.push(Phase {
                name,
                start,
                end: Instant::now(),
            });
        }
    }
}

/// The process's resident memory during a step, sampled after each operation. Clones share their samples.
#[derive(Debug, Clone, Default)]
pub(crate) struct Resident(Arc<Mutex<Vec<(Instant, u64)>>>);

impl Resident {
    /// Adds a sample, if the system reports the memory.
    pub(crate) fn sample(&self) {
        if let Some(bytes) = host::rss_bytes() {
            let mut samples = self.0.lock();
            samples.push((Instant::now(), bytes));
        }
    }

    fn events(&self, clock: &Clock) -> Vec<Value> {
        let samples = self.0.lock();
        let event = |(at, bytes): &(Instant, u64)| clock.counter(RESIDENT, *at, *bytes);
        samples.iter().map(event).collect()
    }
}

/// Creates the events of a rank of the eager engine. Time between operations counts as computation in its phase.
pub(crate) fn eager_events(
    rank: usize,
    origin: Instant,
    phases: &[Phase],
    spans: &[CommSpan],
    resident: &Resident,
) -> Vec<Value> {
    let clock = Clock { rank, origin };
    let mut events = clock.names();
    events.extend(resident.events(&clock));
    for phase in phases {
        let Phase { name, start, end } = *phase;
        events.push(clock.span(name, name, COMPUTE, start, end));
        let mut from = start;
        let mut after = "the batch".to_owned();
        for span in spans {
            if span.start < start || span.end > end {
                continue;
            }
            // An operation that starts immediately has no visible time before its wait.
            if span.start > from {
                let name = format!("compute after {after}");
                events.push(clock.span(&name, "compute", COMPUTE, from, span.start));
            }
            from = span.end;
            after = span.operation.label.as_str().to_owned();
        }
        if end > from {
            let name = format!("compute after {after}");
            events.push(clock.span(&name, "compute", COMPUTE, from, end));
        }
    }
    for span in spans {
        let CommSpan {
            operation,
            stage,
            bytes,
            start,
            end,
            sample,
            ..
        } = span;
        let kind = match stage {
            CommStage::Start => "communication",
            _ => "wait",
        };
        let name = format!("{} {} {stage}", operation.kind, operation.label.as_str());
        let mut event = clock.span(&name, kind, COMMUNICATION, *start, *end);
        event["args"] = json!({"bytes": bytes, "group": operation.group.as_str(),
                               "sequence": operation.sequence});
        events.push(event);
        events.push(clock.counter("unsharded bytes", *end, *sample as u64));
    }
    events
}

/// A rank's clock, which converts its times to trace times.
struct Clock {
    rank: usize,
    origin: Instant,
}

impl Clock {
    fn micros(&self, at: Instant) -> f64 {
        micros(at.saturating_duration_since(self.origin))
    }

    fn names(&self) -> Vec<Value> {
        let name = |what: &str, thread: usize, name: &str| json!({"ph": "M", "name": what, "pid": self.rank, "tid": thread, "args": {"name": name}});
        vec![
            name("process_name", COMPUTE, &format!("rank {}", self.rank)),
            name("thread_name", COMPUTE, "compute"),
            name("thread_name", COMMUNICATION, "communication"),
        ]
    }

    fn counter(&self, name: &str, at: Instant, bytes: u64) -> Value {
        json!({"ph": "C", "name": name, "pid": self.rank, "ts": self.micros(at),
               "args": {"bytes": bytes}})
    }

    fn span(&self, name: &str, kind: &str, row: usize, start: Instant, end: Instant) -> Value {
        let (ts, until) = (self.micros(start), self.micros(end));
        json!({"ph": "X", "name": name, "cat": kind, "pid": self.rank, "tid": row,
               "ts": ts, "dur": until - ts})
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

/// Shifts the times of events to an origin that is earlier by this duration.
pub(crate) fn shifted(mut events: Vec<Value>, by: Duration) -> Vec<Value> {
    for event in &mut events {
        if let Some(ts) = event.get("ts").and_then(Value::as_f64) {
            event["ts"] = json!(ts + micros(by));
        }
    }
    events
}

/// Returns the contents of a trace file: names first, then the events of all ranks by time.
pub(crate) fn file(mut events: Vec<Value>) -> String {
    let time = |event: &Value| event.get("ts").and_then(Value::as_f64).unwrap_or(-1.0);
    events.sort_by(|a, b| time(a).total_cmp(&time(b)));
    // Only strings and numbers, which JSON can always represent.
    serde_json::to_string(&events).unwrap_or_default()
}
