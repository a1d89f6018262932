//! Timelines of the nodes that a step ran.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::graph::{Node, Stage};

/// A node that ran, with its times.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// Name of the operation.
    pub name: String,
    /// `compute`, `communication` or `wait`.
    pub kind: &'static str,
    /// Phase: forward, backward or optimizer.
    pub phase: String,
    /// Index of the node in the schedule.
    pub node: usize,
    /// Time from the beginning of the step to the beginning of the node.
    pub start: Duration,
    /// Duration of the node.
    pub duration: Duration,
    /// Bytes of all tensors after the node.
    pub live_bytes: usize,
}

/// The nodes of one step on one rank, in the order in which they ran.
#[derive(Debug, Clone)]
pub struct Timeline {
    began: Instant,
    spans: Vec<Span>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self::new()
    }
}

impl Timeline {
    /// Creates an empty timeline that begins now.
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            spans: Vec::new(),
        }
    }

    /// Returns the moment at which the timeline began.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// Returns the nodes that ran, in order.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    pub(super) fn record(&mut self, index: usize, node: &Node, start: Instant, live_bytes: usize) {
        let kind = match &node.collective {
            None => "compute",
            Some(collective) if collective.stage == Stage::Wait => "wait",
            Some(_) => "communication",
        };
        let name = match &node.collective {
            Some(collective) => format!("{} {}", collective.name(), collective.label),
            None => node.name(),
        };
        self.spans.push(Span {
            name,
            kind,
            phase: node.phase.to_string(),
            node: index,
            start: start.saturating_duration_since(self.began),
            duration: start.elapsed(),
            live_bytes,
        });
    }

    /// Returns the events of this rank for `chrome://tracing` or Perfetto: one row of computation spans, one row of
    /// communication spans, and a curve of memory. A file holds an array of the events of all ranks.
    pub fn chrome_events(&self, rank: usize) -> Vec<Value> {
        let micros = |duration: Duration| duration.as_secs_f64() * 1e6;
        let name = |thread: usize, name: &str| {
            json!({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread,
                   "args": {"name": name}})
        };
        let process = json!({"ph": "M", "name": "process_name", "pid": rank,
                             "args": {"name": format!("rank {rank}")}});
        let mut events = vec![process, name(0, "compute"), name(1, "communication")];
        for span in &self.spans {
            let thread = usize::from(span.kind != "compute");
            events.push(json!({
                "ph": "X", "name": span.name, "cat": format!("{},{}", span.kind, span.phase),
                "pid": rank, "tid": thread, "ts": micros(span.start), "dur": micros(span.duration),
                "args": {"node": span.node},
            }));
            events.push(json!({
                "ph": "C", "name": "live tensor bytes", "pid": rank,
                "ts": micros(span.start + span.duration), "args": {"bytes": span.live_bytes},
            }));
        }
        events
    }
}
