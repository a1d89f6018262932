//! Records the times of a rank's operations, for timelines of a step.

use std::fmt;
use std::time::Instant;

use super::operation::Operation;

/// The stage of an operation that a span covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommStage {
    /// The start of the operation.
    Start,
    /// The wait for the result; with the `local` engine, the rank also moves the bytes.
    Wait,
}

impl fmt::Display for CommStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "start",
            Self::Wait => "wait",
        })
    }
}

/// A span of time that a rank spent on an operation. The spans of one thread do not overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommSpan {
    /// The operation that the span belongs to.
    pub operation: Operation,
    /// The stage of the operation in the span.
    pub stage: CommStage,
    /// Bytes of the operation's full tensors.
    pub bytes: usize,
    /// The time when the span began.
    pub start: Instant,
    /// The time when the span ended.
    pub end: Instant,
    /// The number that was sampled when the span ended.
    pub sample: usize,
}

/// The spans of a rank since the recording began. A number is sampled at the end of each span.
pub(crate) struct Recording {
    spans: Vec<CommSpan>,
    sample: Box<dyn Fn() -> usize + Send>,
}

impl Recording {
    pub(crate) fn new(sample: impl Fn() -> usize + Send + 'static) -> Self {
        Self {
            spans: Vec::new(),
            sample: Box::new(sample),
        }
    }

    /// Adds a span that ends now.
    pub(crate) fn add(
        &mut self,
        operation: &Operation,
        stage: CommStage,
        bytes: usize,
        start: Instant,
    ) {
        self.spans.push(CommSpan {
            operation: operation.clone(),
            stage,
            bytes,
            start,
            end: Instant::now(),
            sample: (self.sample)(),
        });
    }

    pub(crate) fn into_spans(self) -> Vec<CommSpan> {
        self.spans
    }
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording")
            .field("spans", &self.spans.len())
            .finish_non_exhaustive()
    }
}
