//! The processes below `launch`: who is told of a signal, and who is waited for.
//!
//! A training is told itself, however deep below, by one signal; what stands between (shells, `timeout`, `mpirun`) is not, and
//! ends as it always does when the training has ended. Only where there is no process of this program is the whole process group
//! of the command told, as by a terminal. A process whose parent has died of that is told when it is seen.
//!
//! A script may go on behind a training that was told: what it does then in a short time it may do, and if that lasts the process
//! group is told after all. Who is told itself and goes on does so by a trap of its own, and is told nothing more before the user
//! says so again. After a second signal everything has a short time as well, and is killed then.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGKILL, SIGQUIT, SIGTERM};

use super::signals::Order;
use crate::console;
use crate::process::Process;

/// The time that a script has to end behind a training that was told, and that everything has to end at once: less than
/// schedulers wait between a signal and a kill.
const GRACE: Duration = Duration::from_secs(5);

/// The processes below.
#[derive(Debug)]
pub(super) struct Below {
    /// The first process of the command, whose group has its number.
    first: u32,
    /// When it was started, where the system tells.
    started: Option<u64>,
    /// An entry that the environments of all have.
    entry: String,
    /// The order that they are told.
    order: Option<Order>,
    /// Those that were told, by number and start.
    told: HashSet<(u32, u64)>,
    /// Those of them that are waited for.
    awaited: Vec<Process>,
    /// True once the group was told.
    is_group_told: bool,
    /// The others that were there when the order came.
    known: HashSet<Image>,
    /// Since when no training is left, after the order.
    over_since: Option<Instant>,
    /// When the first order came to end at once.
    at_once_since: Option<Instant>,
    /// True once what is left was killed.
    has_killed: bool,
}

/// A process, and the program that it runs: a shell may give its place to its last command.
type Image = (u32, u64, Option<PathBuf>);

/// The processes that are there at a moment.
struct Seen {
    /// Processes of this program, each the first of its kind on the way down.
    own: Vec<Process>,
    others: Vec<Process>,
}

/// What is left behind a command.
pub(super) struct Left {
    /// The number of processes that are waited for: those of this program, and those that were told to end.
    pub(super) num_awaited: usize,
    /// True if there are processes of other programs.
    pub(super) has_others: bool,
}

impl Below {
    /// Takes the first process of a command, whose environment has this variable.
    pub(super) fn new(first: u32, (name, value): (&str, String)) -> Self {
        Self {
            first,
            started: Process::find(first).map(|first| first.started),
            entry: format!("{name}={value}"),
            order: None,
            told: HashSet::new(),
            awaited: Vec::new(),
            is_group_told: false,
            known: HashSet::new(),
            over_since: None,
            at_once_since: None,
            has_killed: false,
        }
    }

    /// Passes an order on to everyone, once.
    pub(super) fn obey(&mut self, order: Order) {
        self.order = Some(order);
        let is_at_once = matches!(order, Order::AtOnce(_));
        if is_at_once {
            // Again, and nobody but trainings is waited for.
            self.told.clear();
            self.awaited.clear();
            self.at_once_since.get_or_insert_with(Instant::now);
        }
        let seen = self.look();
        self.known = seen.others.iter().map(image).collect();
        self.tell_own(&seen);
        self.is_group_told = seen.own.is_empty() || is_at_once;
        if self.is_group_told {
            self.tell_group(&seen);
        }
    }

    /// Passes the order, if there is one, on to those that were not there before, or had a parent to care for them.
    pub(super) fn tell_late(&mut self) {
        if self.order.is_none() {
            return;
        }
        let seen = self.look();
        if is_over(self.at_once_since) {
            return self.kill(&seen);
        }
        let trains_on = self.tell_own(&seen);
        let late = self.late(&seen);
        // A script that starts the next training, or a long command, when a training was told to end has to be told itself.
        if (trains_on || !late.is_empty()) && !self.is_group_told {
            self.is_group_told = true;
            self.tell_group(&seen);
            // Of another group, and below a shell that may be of another one, too.
            late.iter().for_each(|late| self.tell(late));
        }
        if self.is_group_told {
            let orphans = seen
                .others
                .iter()
                .filter(|other| self.is_orphan(other, &seen));
            let orphans: Vec<_> = orphans.copied().collect();
            orphans.iter().for_each(|orphan| self.tell(orphan));
        }
    }

    /// Returns true if something was passed on.
    pub(super) fn has_order(&self) -> bool {
        self.order.is_some()
    }

    /// Returns what is left behind the command.
    pub(super) fn left(&mut self) -> Left {
        self.awaited.retain(Process::is_alive);
        let awaited = &self.awaited;
        let Seen { own, others } = self.look();
        Left {
            num_awaited: awaited.len() + own.iter().filter(|own| !awaited.contains(own)).count(),
            has_others: !others.is_empty(),
        }
    }

    fn look(&self) -> Seen {
        let all = Process::all();
        let parent = |of: &Process| all.iter().find(|process| process.id == of.parent);
        let this = std::process::id();
        let above = |of: &Process| {
            // No chain is longer than there are processes.
            let up = std::iter::successors(parent(of), |process| parent(process));
            up.take(all.len()).take_while(|process| process.id != this)
        };
        // When all of the group have ended, its number may be that of another process.
        let mut holders = all.iter().filter(|process| process.id == self.first);
        let is_ours = holders.all(|holder| Some(holder.started) == self.started);
        let is_near = |process: &Process| {
            process.id == self.first
                || process.group == self.first
                || above(process).any(|up| up.id == self.first)
        };
        let is_below = |process: &&Process| {
            process.id != this
                && ((is_ours && is_near(process)) || process.has_in_environment(&self.entry))
        };
        let below: Vec<_> = all.iter().filter(is_below).copied().collect();
        let (mut own, others): (Vec<_>, Vec<_>) =
            below.into_iter().partition(Process::is_of_this_program);
        // A `launch` below tells those below it.
        let ids: HashSet<_> = own.iter().map(|own| own.id).collect();
        own.retain(|own| !above(own).any(|up| ids.contains(&up.id)));
        Seen { own, others }
    }

    /// Returns what was started after the order, and is still there when the trainings have been over for a while. What was there
    /// before may have to wait for trainings of other machines, as `mpirun` does.
    fn late(&mut self, seen: &Seen) -> Vec<Process> {
        if !seen.own.is_empty() {
            self.over_since = None;
            return Vec::new();
        }
        self.over_since.get_or_insert_with(Instant::now);
        if !is_over(self.over_since) {
            return Vec::new();
        }
        let is_new = |other: &&Process| !self.known.contains(&image(other));
        seen.others.iter().filter(is_new).copied().collect()
    }

    /// Kills everything that is left.
    fn kill(&mut self, seen: &Seen) {
        let left: Vec<_> = seen.own.iter().chain(&seen.others).collect();
        if !left.is_empty() && !std::mem::replace(&mut self.has_killed, true) {
            console::tell(format_args!(
                "warning: {} processes below have not ended since they were told to end at once, and are killed",
                left.len()
            ));
        }
        left.into_iter().for_each(|left| send(SIGKILL, left));
    }

    /// Returns true for one that is below, whose parent is not, or no more.
    fn is_orphan(&self, process: &Process, seen: &Seen) -> bool {
        let is_parent = |other: &Process| other.id == process.parent;
        process.group != self.first && !seen.own.iter().chain(&seen.others).any(is_parent)
    }

    /// Tells those of this program; returns true if one of them had not been told.
    fn tell_own(&mut self, seen: &Seen) -> bool {
        let before = self.told.len();
        seen.own.iter().for_each(|own| self.tell(own));
        self.told.len() > before
    }

    /// Tells one, if it has not been told.
    fn tell(&mut self, process: &Process) {
        let (signal, is_awaited) = match self.order {
            Some(Order::AtOnce(_)) if process.is_of_this_program() => (SIGQUIT, true),
            Some(Order::AtOnce(signal)) => (signal, false),
            // Shells have what they start in the background ignore SIGINT. Who ignores SIGHUP is to outlive a terminal.
            Some(Order::End(signal)) if signal != SIGHUP && process.ignores(signal) => {
                (SIGTERM, true)
            }
            Some(Order::End(signal)) => (signal, true),
            None => return,
        };
        if self.told.insert((process.id, process.started)) {
            if is_awaited && !process.ignores(signal) {
                self.awaited.push(*process);
            }
            send(signal, process);
        }
    }

    /// Tells the process group of the command, if it has a member. Where the system lists no processes, it is all there is.
    fn tell_group(&mut self, seen: &Seen) {
        let Some(Order::End(signal) | Order::AtOnce(signal)) = self.order else {
            return;
        };
        let is_member = |process: &&Process| process.group == self.first;
        let members: Vec<_> = seen.others.iter().filter(is_member).copied().collect();
        let is_listed = Process::find(std::process::id()).is_some();
        if !is_listed || !members.is_empty() {
            // The last may have ended meanwhile.
            kill(signal, &format!("-{}", self.first));
        }
        for member in members {
            self.told.insert((member.id, member.started));
            if matches!(self.order, Some(Order::End(_))) && !member.ignores(signal) {
                self.awaited.push(member);
            }
        }
    }
}

/// Returns true when what began then has had its time.
fn is_over(since: Option<Instant>) -> bool {
    since.is_some_and(|since| since.elapsed() >= GRACE)
}

fn image(process: &Process) -> Image {
    let program = fs::read_link(format!("/proc/{}/exe", process.id));
    (process.id, process.started, program.ok())
}

/// Sends a signal to a process, and says so if that cannot be.
fn send(signal: i32, process: &Process) {
    if !kill(signal, &process.id.to_string()) && process.is_alive() {
        console::tell(format_args!(
            "warning: signal {signal} could not be passed on to process {}",
            process.id
        ));
    }
}

/// Returns true if the signal was sent. The standard library can send none but SIGKILL; every shell can.
fn kill(signal: i32, target: &str) -> bool {
    let line = format!("kill -{signal} {target} 2>/dev/null");
    let sent = Command::new("sh").args(["-c", &line]).status();
    sent.is_ok_and(|status| status.success())
}
