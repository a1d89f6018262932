//! A rank's end of a group of processes.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use super::header::signature_bytes;
use super::progress::Command;
use super::round::{Shared, Start};
use crate::control::{Control, WORLD_DOMAIN};
use crate::engine::{Awaited, Claim, Engine, Findings, Flight, Request, Subgroup, Withdrawn};
use crate::rank_state::RankState;
use crate::{Buffer, Source};

pub(super) struct MpiEnd {
    control: Arc<Control>,
    /// The group's number in the world.
    number: u64,
    /// The members by their rank in the world, which equals their rank in MPI's world.
    members: Arc<[usize]>,
    rank: usize,
    state: Arc<RankState>,
    commands: Sender<Command>,
}

impl MpiEnd {
    /// Returns the end of the group of all ranks.
    pub(super) fn new(
        control: Arc<Control>,
        members: Arc<[usize]>,
        rank: usize,
        state: Arc<RankState>,
        commands: Sender<Command>,
    ) -> Self {
        let _ = commands.send(Command::Domain(control.clone()));
        Self {
            control,
            number: WORLD_DOMAIN,
            members,
            rank,
            state,
            commands,
        }
    }
}

impl fmt::Debug for MpiEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MpiEnd({} in {:?})", self.rank, self.members)
    }
}

impl Engine for MpiEnd {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn control(&self) -> &Arc<Control> {
        &self.control
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn start(&self, request: Request) -> Box<dyn Flight> {
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
            pool: self.state.pool.clone(),
            shared: shared.clone(),
        };
        // The thread is gone only when the world is over; the control then reports that.
        let _ = self.commands.send(Command::Start(Box::new(start)));
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
            state: self.state.clone(),
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
    fn is_there(&self, awaited: Awaited) -> bool {
        match awaited {
            Awaited::Claims => self.shared.has_all_claims(),
            Awaited::Result => self.shared.has_result(),
            Awaited::Release => self.shared.is_released(),
        }
    }

    fn missing(&self, awaited: Awaited) -> Vec<usize> {
        self.shared.missing(awaited)
    }

    fn claim(&self, rank: usize) -> &Claim {
        self.shared.claim(rank)
    }

    fn begin(&mut self) -> Result<(), Withdrawn> {
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

    fn receive(&mut self) -> Result<Vec<Buffer>, Withdrawn> {
        self.shared.complete(&std::mem::take(&mut self.sources));
        Ok(self.shared.landing.take())
    }
}
