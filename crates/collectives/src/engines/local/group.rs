//! The state that the ranks of a group share, and a rank's handle to it.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::flight::LocalFlight;
use super::round::{Offer, Round};
use super::team::Team;
use burn_fsdp_rendezvous::{Claim, Control, Meeting, Messages, Operation, Subgroup};
use burn_fsdp_transport::{BufferPool, Engine, Flight, Request};

/// The state that the ranks of one group share.
#[derive(Debug)]
pub(super) struct LocalGroup {
    team: Arc<Team>,
    /// The operations that some ranks have yet to start, by sequence number.
    rounds: Mutex<HashMap<u64, Arc<Round>>>,
    /// The subgroups that some members have yet to collect, by number.
    subgroups: Mutex<HashMap<u64, Uncollected>>,
}

#[derive(Debug)]
struct Uncollected {
    group: Arc<LocalGroup>,
    num_collected: usize,
}

impl LocalGroup {
    pub(super) fn new(control: Arc<Control>, pools: Vec<BufferPool>) -> Arc<Self> {
        let (rounds, subgroups) = Default::default();
        Arc::new(Self {
            team: Arc::new(Team::new(control, pools)),
            rounds,
            subgroups,
        })
    }

    /// Returns a rank's handle to the group.
    pub(super) fn handle(group: &Arc<Self>, rank: usize) -> LocalHandle {
        LocalHandle {
            group: group.clone(),
            rank,
        }
    }

    /// Publishes a rank's part in the operation with this number, and wakes the ranks that wait for it.
    fn join(&self, sequence: u64, rank: usize, offer: Offer) -> Arc<Round> {
        let mut rounds = self.rounds.lock();
        let round = rounds
            .entry(sequence)
            .or_insert_with(|| Arc::new(Round::new(self.team.size())));
        let round = round.clone();
        round.publish(rank, offer);
        if round.has_all() {
            // Every rank that needs the round has it now.
            rounds.remove(&sequence);
        }
        drop(rounds);
        self.team.ring();
        round
    }

    /// Returns the subgroup. The first member to call creates it, and the last removes it from the map.
    fn collect(&self, subgroup: &Subgroup) -> Arc<LocalGroup> {
        let mut subgroups = self.subgroups.lock();
        let uncollected = subgroups.entry(subgroup.number).or_insert_with(|| {
            let members = subgroup.members.iter();
            let pools = members.map(|member| self.team.pool(*member).clone());
            let control = match subgroup.isolated {
                Some(deadline) => self.team.control.isolate(subgroup.number, deadline),
                None => self.team.control.clone(),
            };
            let group = LocalGroup::new(control, pools.collect());
            Uncollected {
                group,
                num_collected: 0,
            }
        });
        uncollected.num_collected += 1;
        let group = uncollected.group.clone();
        if uncollected.num_collected == group.team.size() {
            subgroups.remove(&subgroup.number);
        }
        group
    }
}

/// A rank's handle to a [`LocalGroup`].
#[derive(Debug)]
pub(super) struct LocalHandle {
    group: Arc<LocalGroup>,
    rank: usize,
}

impl Messages for LocalHandle {
    fn control(&self) -> &Arc<Control> {
        &self.group.team.control
    }

    fn post(&self, operation: &Operation, claim: Claim) -> Arc<dyn Meeting> {
        let offer = Offer::new(claim, Vec::new());
        self.group.join(operation.sequence, self.rank, offer)
    }
}

impl Engine for LocalHandle {
    fn name(&self) -> &'static str {
        "local"
    }

    fn reads_in_place(&self) -> bool {
        true
    }

    fn shares_devices(&self) -> bool {
        true
    }

    fn start(&self, request: Request) -> Box<dyn Flight> {
        let Request {
            operation,
            claim,
            sources,
            into,
        } = request;
        let offer = Offer::new(claim, sources);
        let round = self.group.join(operation.sequence, self.rank, offer);
        let team = self.group.team.clone();
        Box::new(LocalFlight::new(team, self.rank, round, into))
    }

    fn split(&self, subgroup: Subgroup) -> Box<dyn Engine> {
        Box::new(LocalGroup::handle(
            &self.group.collect(&subgroup),
            subgroup.rank,
        ))
    }
}
