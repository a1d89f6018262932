//! A rank's handle to a group of processes.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use super::header::signature_bytes;
use super::progress::Command;
use super::round::{Shared, Start};
use burn_fsdp_rendezvous::{Claim, Control, Meeting, Messages, Operation, Subgroup, WORLD_DOMAIN};
use burn_fsdp_transport::{
    Awaited, BufferPool, Completion, Engine, Findings, Flight, Request, Source, Stopped,
};

pub(super) struct MpiHandle {
    control: Arc<Control>,
    /// The group's number in the world.
    number: u64,
    /// The members by their rank in the world, which equals their rank in MPI's world.
    members: Arc<[usize]>,
    rank: usize,
    pool: BufferPool,
    commands: Sender<Command>,
}

impl MpiHandle {
    /// Returns the handle to the group of all ranks.
    pub(super) fn new(
        control: Arc<Control>,
        members: Arc<[usize]>,
        rank: usize,
        pool: BufferPool,
        commands: Sender<Command>,
    ) -> Self {
        let _ = commands.send(Command::Domain(control.clone()));
        Self {
            control,
            number: WORLD_DOMAIN,
            members,
            rank,
            pool,
            commands,
        }
    }
}

impl fmt::Debug for MpiHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MpiHandle({} in {:?})", self.rank, self.members)
    }
}

impl MpiHandle {
    /// Makes MPI's thread start an operation.
    fn command(&self, request: Request) -> (Arc<Shared>, Vec<Source>) {
        let Request {
            operation,
            claim,
            sources,
            into,
        } = request;
        let receives = !into.is_empty();
        let shared = Arc::new(Shared::new(self.members.len(), self.rank, claim, into));
        let start = Start {
            key: (self.number, operation.sequence),
            members: self.members.clone(),
            control: self.control.clone(),
            signature: signature_bytes(&shared.claim(self.rank).signature),
            sources: sources.clone(),
            receives,
            pool: self.pool.clone(),
            shared: shared.clone(),
        };
        // The thread is gone only when the world is over; the control then reports that.
        let _ = self.commands.send(Command::Start(Box::new(start)));
        (shared, sources)
    }
}

impl Messages for MpiHandle {
    fn control(&self) -> &Arc<Control> {
        &self.control
    }

    fn post(&self, operation: &Operation, claim: Claim) -> Arc<dyn Meeting> {
        let (shared, _) = self.command(Request {
            operation: operation.clone(),
            claim,
            sources: Vec::new(),
            into: Vec::new(),
        });
        shared
    }
}

impl Engine for MpiHandle {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn start(&self, request: Request) -> Box<dyn Flight> {
        let (shared, sources) = self.command(request);
        Box::new(MpiFlight { shared, sources })
    }

    fn split(&self, subgroup: Subgroup) -> Box<dyn Engine> {
        let members = subgroup.members.iter().map(|member| self.members[*member]);
        let control = match subgroup.isolated {
            Some(deadline) => {
                let control = self.control.isolate(subgroup.number, deadline);
                let _ = self.commands.send(Command::Domain(control.clone()));
                control
            }
            None => self.control.clone(),
        };
        Box::new(Self {
            control,
            number: subgroup.number,
            members: members.collect(),
            rank: subgroup.rank,
            pool: self.pool.clone(),
            commands: self.commands.clone(),
        })
    }
}

/// An operation that MPI's thread carries out.
struct MpiFlight {
    shared: Arc<Shared>,
    sources: Vec<Source>,
}

impl Flight for MpiFlight {
    fn meeting(&self) -> &dyn Meeting {
        &*self.shared
    }

    fn is_there(&self, awaited: Awaited) -> bool {
        match awaited {
            Awaited::Result => self.shared.has_result(),
            Awaited::Release => self.shared.is_released(),
        }
    }

    fn missing(&self, awaited: Awaited) -> Vec<usize> {
        self.shared.missing(awaited)
    }

    fn begin(&mut self) -> Result<(), Stopped> {
        if self.shared.is_moved() {
            self.shared.complete(&std::mem::take(&mut self.sources));
        }
        Ok(())
    }

    fn findings(&mut self) -> Findings {
        Findings {
            altered: self.shared.altered_addend(),
            ..Findings::default()
        }
    }

    fn receive(&mut self) -> Result<Completion, Stopped> {
        self.shared.complete(&std::mem::take(&mut self.sources));
        Ok(Completion::Done(self.shared.landing.take()))
    }
}
