//! The engine's part of an operation.

use std::sync::Arc;

use burn_fsdp_rendezvous::{Meeting, Who};
use burn_fsdp_transport::{
    Awaited, Buffer, Completion, Engine, Findings, Flight, Request, Space, Stopped,
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

    pub(super) fn begin(&mut self) -> Result<(), Stopped> {
        match self {
            Self::Posted(_) => Ok(()),
            Self::Flying(flight) => flight.begin(),
        }
    }

    pub(super) fn receive(&mut self) -> Result<Completion, Stopped> {
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

/// The buffers of a request, to compare with its result.
pub(super) struct Wanted {
    /// The memory of all buffers, except empty ones.
    space: Space,
    lens: Box<[usize]>,
}

impl Wanted {
    pub(super) fn new(into: &[Buffer]) -> Self {
        let elsewhere = |buffer: &&Buffer| !buffer.is_empty() && buffer.host().is_none();
        Self {
            space: into
                .iter()
                .find(elsewhere)
                .map_or(Space::Host, Buffer::space),
            lens: into.iter().map(Buffer::len).collect(),
        }
    }

    /// Describes how a result differs from the request: the expected and the returned buffers.
    pub(super) fn difference(&self, completion: &Completion) -> Option<(String, String)> {
        let buffers = match completion {
            Completion::Done(buffers) | Completion::Enqueued { buffers, .. } => buffers,
        };
        if buffers.len() != self.lens.len() {
            let [expected, got] = [self.lens.len(), buffers.len()].map(|n| format!("{n} buffers"));
            return Some((expected, got));
        }
        let is_done = matches!(completion, Completion::Done(_));
        let mut pairs = self.lens.iter().zip(buffers).enumerate();
        pairs.find_map(|(index, (len, buffer))| {
            let is_host = buffer.host().is_some();
            if *len == buffer.len() && (*len == 0 || is_host && is_done && self.is_host()) {
                return None;
            }
            self.other(index, buffer, is_done)
        })
    }

    fn is_host(&self) -> bool {
        matches!(self.space, Space::Host)
    }

    /// Describes how a buffer that is not simply filled on the host differs from the request, if it does.
    #[cold]
    fn other(&self, index: usize, buffer: &Buffer, is_done: bool) -> Option<(String, String)> {
        let (len, space) = (self.lens[index], self.space);
        let text = |len, space| format!("{len} bytes in {space} for buffer {index}");
        let got = text(buffer.len(), buffer.space());
        let problem = if buffer.len() != len || buffer.space() != space {
            ""
        } else if !buffer.is_arrived() {
            " that never arrived"
        } else if !is_done && buffer.host().is_some() {
            " that are still to be filled"
        } else {
            return None;
        };
        Some((text(len, space), got + problem))
    }
}
