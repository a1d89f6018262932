//! The thread that owns MPI.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use super::header::{ClaimHeader, Header};
use super::round::{Round, Start};
use super::wire::{FIRST_DATA_TAG, Incoming, LAST_DATA_TAG, Transfer, Wire, WireError};
use burn_fsdp_rendezvous::{Control, Meeting, News, WORLD_DOMAIN};
use burn_fsdp_transport::Source;

/// The time that the thread polls without a pause if nothing progresses while the rank waits. After that, the thread
/// sleeps between polls.
const LOOK_FOR: Duration = Duration::from_millis(1);

/// The same limit while the rank computes. It is short because polling may take the rank's core, but long enough for a
/// rank that has started an operation and is about to wait.
const LOOK_UNAWAITED_FOR: Duration = Duration::from_micros(20);

/// The sleep between two polls while operations are in progress.
const SHORT_SLEEP: Duration = Duration::from_micros(50);

/// The sleep between two polls while no operations are in progress. A command wakes the thread immediately. Other
/// ranks' headers only matter once this rank starts the operation, and news of failures may be delayed by this much.
const LONG_SLEEP: Duration = Duration::from_millis(1);

/// A command from the rank's threads to MPI's thread.
pub(super) enum Command {
    Start(Box<Start>),
    /// Adds a failure domain that this rank belongs to.
    Domain(Arc<Control>),
    Tell(News),
    /// Ends MPI, with or without the other processes.
    Close {
        with_others: bool,
    },
}

pub(super) struct Progress {
    wire: Wire,
    rank: usize,
    commands: Receiver<Command>,
    rounds: HashMap<(u64, u64), Round>,
    /// Headers that have begun to arrive, in order of arrival.
    incoming: VecDeque<Incoming>,
    /// Headers of operations that this rank will start later.
    early: HashMap<(u64, u64), Vec<(usize, ClaimHeader)>>,
    domains: HashMap<u64, Arc<Control>>,
    /// Failures of domains that this rank may enter later, or never.
    early_failures: HashMap<u64, (usize, String)>,
    early_departed: Vec<usize>,
    /// Headers in transit.
    outbox: Vec<Transfer>,
    /// The next tag for data to each rank of the world.
    next_tags: Vec<u32>,
}

impl Progress {
    pub(super) fn new(wire: Wire, commands: Receiver<Command>) -> Self {
        let (rank, size) = wire.place();
        Self {
            wire,
            rank,
            commands,
            rounds: HashMap::new(),
            incoming: VecDeque::new(),
            early: HashMap::new(),
            domains: HashMap::new(),
            early_failures: HashMap::new(),
            early_departed: Vec::new(),
            outbox: Vec::new(),
            next_tags: vec![FIRST_DATA_TAG; size],
        }
    }

    /// Serves this rank until it receives a close command.
    pub(super) fn run(mut self) {
        let mut moved_at = Instant::now();
        let with_others = loop {
            let command = self.next_command(moved_at);
            let has_command = command.is_some();
            let moved = match command {
                Some(Command::Close { with_others }) => break with_others,
                Some(command) => self.obey(command),
                None => Ok(()),
            };
            let moved = moved.and_then(|()| self.look());
            match moved {
                Ok(false) if !has_command => {}
                Ok(_) => moved_at = Instant::now(),
                Err(error) => self.fail(&error),
            }
        };
        self.close(with_others);
    }

    /// Returns the next command; waits for a while if there is nothing else to do.
    fn next_command(&self, moved_at: Instant) -> Option<Command> {
        match self.commands.try_recv() {
            Ok(command) => return Some(command),
            // All senders are gone, but none has sent a close command. This happens when a failed rank leaves.
            Err(TryRecvError::Disconnected) => return Some(Command::Close { with_others: false }),
            Err(TryRecvError::Empty) => {}
        }
        let is_busy = !self.rounds.is_empty() || !self.outbox.is_empty();
        let look_for = match self.domains.get(&WORLD_DOMAIN) {
            Some(control) if !control.is_awaited() => LOOK_UNAWAITED_FOR,
            _ => LOOK_FOR,
        };
        if is_busy && moved_at.elapsed() < look_for {
            thread::yield_now();
            return None;
        }
        let sleep = if is_busy { SHORT_SLEEP } else { LONG_SLEEP };
        match self.commands.recv_timeout(sleep) {
            Ok(command) => Some(command),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Command::Close { with_others: false }),
        }
    }

    fn obey(&mut self, command: Command) -> Result<(), WireError> {
        match command {
            Command::Start(start) => self.start(*start),
            Command::Domain(control) => {
                if let Some((rank, reason)) = self.early_failures.remove(&control.domain()) {
                    control.has_failed(rank, reason);
                }
                if control.domain() == WORLD_DOMAIN {
                    for rank in self.early_departed.drain(..) {
                        control.world().has_departed(rank);
                    }
                }
                self.domains.insert(control.domain(), control);
                Ok(())
            }
            Command::Tell(news) => {
                let header = Source::new(Header::News(news).to_bytes());
                for to in (0..self.next_tags.len()).filter(|to| *to != self.rank) {
                    self.outbox.push(self.wire.send_header(header.clone(), to)?);
                }
                Ok(())
            }
            // `run` has taken it out of the queue.
            Command::Close { .. } => Ok(()),
        }
    }

    fn start(&mut self, start: Start) -> Result<(), WireError> {
        let mut tags = vec![0; start.members.len()];
        for (to, world_rank) in start.members.iter().enumerate() {
            if to == start.shared.rank {
                continue;
            }
            tags[to] = self.next_tags[*world_rank];
            let next = tags[to] + 1;
            self.next_tags[*world_rank] = if next > LAST_DATA_TAG {
                FIRST_DATA_TAG
            } else {
                next
            };
            let header = Header::Claim(ClaimHeader {
                round: start.key,
                tag: tags[to],
                receives: start.receives,
                signature: start.signature.clone(),
                note: start.shared.claim(start.shared.rank).note.clone(),
                checks: start.shared.claim(start.shared.rank).checks.clone(),
            });
            let header = Source::new(header.to_bytes());
            self.outbox
                .push(self.wire.send_header(header, *world_rank)?);
        }
        let key = start.key;
        let mut round = Round::new(start, tags);
        for (from, header) in self.early.remove(&key).unwrap_or_default() {
            round.hear(&self.wire, from, header)?;
        }
        self.rounds.insert(key, round);
        Ok(())
    }

    /// Reads incoming headers and checks the progress of the transfers. Returns true if anything moved.
    fn look(&mut self) -> Result<bool, WireError> {
        let mut has_moved = false;
        while let Some(incoming) = self.wire.next_header()? {
            self.incoming.push_back(incoming);
        }
        // Headers of one rank are read in the order in which it sent them. A rank that stops while sending one does not
        // delay the headers of others.
        let mut late = BTreeSet::new();
        let mut index = 0;
        while index < self.incoming.len() {
            let incoming = &mut self.incoming[index];
            if late.contains(&incoming.from) || !incoming.is_complete()? {
                late.insert(incoming.from);
                index += 1;
            } else if let Some(incoming) = self.incoming.remove(index) {
                has_moved = true;
                self.read(incoming.from, &incoming.take())?;
            }
        }
        let mut failed = None;
        self.rounds
            .retain(|_, round| match round.advance(&self.wire) {
                Ok((moved, is_over)) => {
                    has_moved |= moved;
                    !is_over && !round.is_given_up()
                }
                Err(error) => {
                    failed = Some(error);
                    false
                }
            });
        self.outbox
            .retain_mut(|transfer| match transfer.is_complete() {
                Ok(is_complete) => !is_complete,
                Err(error) => {
                    failed = Some(error);
                    false
                }
            });
        failed.map_or(Ok(has_moved), Err)
    }

    fn read(&mut self, from: usize, header: &[u8]) -> Result<(), WireError> {
        match Header::of_bytes(header) {
            Some(Header::Claim(claim)) => match self.rounds.get_mut(&claim.round) {
                Some(round) => round.hear(&self.wire, from, claim)?,
                None => {
                    let early = self.early.entry(claim.round).or_default();
                    early.push((from, claim));
                }
            },
            Some(Header::News(news)) => self.hear(news),
            None => self.hear(News::Failed {
                domain: WORLD_DOMAIN,
                rank: from,
                reason: "sent a header that cannot be read; run the same binary on all ranks"
                    .to_owned(),
            }),
        }
        Ok(())
    }

    fn hear(&mut self, news: News) {
        match news {
            News::Failed {
                domain,
                rank,
                reason,
            } => match self.domains.get(&domain) {
                Some(control) => {
                    control.has_failed(rank, reason);
                }
                None => {
                    self.early_failures.entry(domain).or_insert((rank, reason));
                }
            },
            News::Departed(rank) => match self.domains.get(&WORLD_DOMAIN) {
                Some(control) => control.world().has_departed(rank),
                None => self.early_departed.push(rank),
            },
            // A rank that has yet to join its world waits for no other rank and needs no explanation.
            News::Waits { rank, wait } => {
                if let Some(control) = self.domains.get(&WORLD_DOMAIN) {
                    control.world().waits(rank, wait);
                }
            }
        }
    }

    /// Ends all operations because MPI itself has failed.
    fn fail(&mut self, error: &WireError) {
        let reason = format!("{error}; check the output of MPI and of the other ranks");
        match self.domains.get(&WORLD_DOMAIN) {
            // Ends the waits of this rank, and notifies the others if MPI still can.
            Some(control) => control.fail(self.rank, reason),
            None => {
                let failure = (self.rank, reason);
                self.early_failures.entry(WORLD_DOMAIN).or_insert(failure);
            }
        }
    }

    fn close(mut self, with_others: bool) {
        // Carry out the remaining commands, which may send messages.
        while let Ok(command) = self.commands.try_recv() {
            let _ = self.obey(command);
        }
        let give_up_at = Instant::now() + Duration::from_secs(1);
        while !(self.outbox.is_empty() && self.rounds.is_empty()) && Instant::now() < give_up_at {
            if self.look().is_err() {
                break;
            }
            thread::yield_now();
        }
        let is_clean = self.rounds.is_empty() && self.outbox.is_empty() && self.incoming.is_empty();
        self.rounds.clear();
        self.outbox.clear();
        if with_others && is_clean {
            // Finalises MPI, which waits for the others to do so.
            drop(self.wire);
        } else {
            self.wire.leave();
        }
    }
}
