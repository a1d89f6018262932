//! The engine of a rank without peers, which simulates them.
//!
//! Every operation completes immediately. The peers are assumed to have contributed the same as this rank. A single
//! rank of many can therefore run a training step on one thread, with the same operations, buffers and memory as with
//! real peers. Only the values are artificial.

use std::sync::Arc;

use burn_fsdp_rendezvous::{
    Claim, Control, Meeting, Messages, Operation, OperationKind, Route, Subgroup,
};
use burn_fsdp_transport::{
    Awaited, Buffer, Completion, Engine, Flight, Request, Source, Stopped, copy, reduce,
};

/// Returns the handle of rank `rank`, the only existing rank of a group of `size` ranks.
pub(crate) fn handle(control: Arc<Control>, size: usize, rank: usize) -> Box<dyn Engine> {
    Box::new(FakeHandle {
        rank,
        size,
        control,
    })
}

/// A rank's handle to a group whose other ranks do not exist.
#[derive(Debug)]
struct FakeHandle {
    rank: usize,
    size: usize,
    control: Arc<Control>,
}

impl Messages for FakeHandle {
    fn control(&self) -> &Arc<Control> {
        &self.control
    }

    fn post(&self, _: &Operation, claim: Claim) -> Arc<dyn Meeting> {
        Arc::new(FakeMeeting { claim })
    }
}

impl Engine for FakeHandle {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn start(&self, request: Request) -> Box<dyn Flight> {
        let Request {
            claim,
            sources,
            into,
            ..
        } = request;
        Box::new(FakeFlight {
            rank: self.rank,
            size: self.size,
            meeting: FakeMeeting { claim },
            sources,
            into,
        })
    }

    fn split(&self, subgroup: Subgroup) -> Box<dyn Engine> {
        let control = match subgroup.isolated {
            Some(deadline) => self.control.isolate(subgroup.number, deadline),
            None => self.control.clone(),
        };
        Box::new(Self {
            rank: subgroup.rank,
            size: subgroup.members.len(),
            control,
        })
    }

    fn has_peers(&self) -> bool {
        false
    }
}

/// The claims of ranks that all make the same call.
struct FakeMeeting {
    claim: Claim,
}

impl Meeting for FakeMeeting {
    fn is_complete(&self) -> bool {
        true
    }

    fn absent(&self) -> Vec<usize> {
        Vec::new()
    }

    fn claim(&self, _: usize) -> &Claim {
        &self.claim
    }
}

struct FakeFlight {
    rank: usize,
    size: usize,
    meeting: FakeMeeting,
    sources: Vec<Source>,
    into: Vec<Buffer>,
}

impl Flight for FakeFlight {
    fn meeting(&self) -> &dyn Meeting {
        &self.meeting
    }

    fn is_there(&self, _: Awaited) -> bool {
        true
    }

    fn missing(&self, _: Awaited) -> Vec<usize> {
        Vec::new()
    }

    fn receive(&mut self) -> Result<Completion, Stopped> {
        let signature = &self.meeting.claim.signature;
        let mut buffers = std::mem::take(&mut self.into);
        let sources = std::mem::take(&mut self.sources);
        for (part, (source, buffer)) in sources.iter().zip(&mut buffers).enumerate() {
            match &signature.reduction {
                Some(reduction) => {
                    let element = signature.extents[part].element;
                    let own = match signature.kind {
                        OperationKind::AllReduce => source.as_bytes(),
                        _ => &source.as_bytes()[self.own_route(part).given],
                    };
                    let copies = vec![own; self.size];
                    reduce(reduction, element, &copies, buffer.as_mut());
                }
                None => self.repeat(part, source, buffer),
            }
        }
        Ok(Completion::Done(buffers))
    }
}

impl FakeFlight {
    /// Returns the route of the bytes that this rank sends to itself.
    fn own_route(&self, part: usize) -> Route {
        let mut routes = self.meeting.claim.signature.routes(self.rank, self.rank);
        routes.swap_remove(part)
    }

    /// Copies the bytes that this rank sends to itself into every rank's place, as far as they fit. The rest becomes
    /// zero, including the data of a root other than this rank.
    fn repeat(&self, part: usize, source: &Source, buffer: &mut Buffer) {
        let signature = &self.meeting.claim.signature;
        let gives = signature.travels(self.rank, self.rank);
        let own = if gives {
            &source.as_bytes()[self.own_route(part).given]
        } else {
            &[]
        };
        for from in (0..self.size).filter(|from| signature.travels(*from, self.rank)) {
            let mut routes = signature.routes(from, self.rank);
            let place = &mut buffer.as_mut()[routes.swap_remove(part).placed];
            let (fits, rest) = place.split_at_mut(own.len().min(place.len()));
            copy(&own[..fits.len()], fits);
            rest.fill(0);
        }
    }
}
