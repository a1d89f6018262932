//! The engine's part of an operation.

use std::sync::Arc;

use burn_fsdp_rendezvous::{Meeting, Who};
use burn_fsdp_transport::{
    Awaited, Buffer, Completion, Engine, Findings, Flight, Request, Space, Withdrawn,
};

/// An operation that this rank has started on its engine.
pub(super) enum Started {
    /// An operation that sends only claims and notes.
    Posted(Arc<dyn Meeting>),
    Flying(Box<dyn Flight>),
}

impl Started {
    pub(super) fn new(engine: &dyn Engine, request: Request) -> Self {
        let contract = request.claim.signature.kind.contract();
        if contract.gives.who == Who::Nobody {
            Self::Posted(engine.post(&request.operation, request.claim))
        } else {
            Self::Flying(engine.start(request))
        }
    }

    /// Returns the claims of all ranks.
    pub(super) fn meeting(&self) -> &dyn Meeting {
        match self {
            Self::Posted(meeting) => &**meeting,
            Self::Flying(flight) => flight.meeting(),
        }
    }

    pub(super) fn is_there(&self, awaited: Awaited) -> bool {
        match self {
            Self::Posted(_) => true,
            Self::Flying(flight) => flight.is_there(awaited),
        }
    }

    pub(super) fn missing(&self, awaited: Awaited) -> Vec<usize> {
        match self {
            Self::Posted(_) => Vec::new(),
            Self::Flying(flight) => flight.missing(awaited),
        }
    }

    pub(super) fn begin(&mut self) -> Result<(), Withdrawn> {
        match self {
            Self::Posted(_) => Ok(()),
            Self::Flying(flight) => flight.begin(),
        }
    }

    pub(super) fn receive(&mut self) -> Result<Completion, Withdrawn> {
        match self {
            Self::Posted(_) => Ok(Completion::Done(Vec::new())),
            Self::Flying(flight) => flight.receive(),
        }
    }

    pub(super) fn findings(&mut self) -> Findings {
        match self {
            Self::Posted(_) => Findings::default(),
            Self::Flying(flight) => flight.findings(),
        }
    }
}

/// The buffers of a request, with which its result is compared.
pub(super) struct Wanted(Vec<(Space, usize)>);

impl Wanted {
    pub(super) fn new(into: &[Buffer]) -> Self {
        Self(into.iter().map(Self::of).collect())
    }

    fn of(buffer: &Buffer) -> (Space, usize) {
        (buffer.space(), buffer.len())
    }

    /// Returns how a result differs from the request, as two texts: the expected and the returned buffers.
    pub(super) fn difference(&self, completion: &Completion) -> Option<(String, String)> {
        let (buffers, is_enqueued) = match completion {
            Completion::Done(buffers) => (buffers, false),
            Completion::Enqueued { buffers, .. } => (buffers, true),
        };
        if buffers.len() != self.0.len() {
            let [expected, got] = [self.0.len(), buffers.len()].map(|n| format!("{n} buffers"));
            return Some((expected, got));
        }
        let mut pairs = self.0.iter().zip(buffers).enumerate();
        pairs.find_map(|(index, (wanted, buffer))| {
            let got = Self::of(buffer);
            let text = |(space, len)| format!("{len} bytes in {space} for buffer {index}");
            if *wanted != got || !buffer.is_arrived() {
                let missing = if buffer.is_arrived() {
                    ""
                } else {
                    " that never arrived"
                };
                return Some((text(*wanted), text(got) + missing));
            }
            let is_late = is_enqueued && buffer.host().is_some();
            let late = || format!("host bytes that are yet to come for buffer {index}");
            is_late.then(|| (text(*wanted), late()))
        })
    }
}
