//! The processes below `launch`: which of them receive a signal, and which of them `launch` waits for.
//!
//! A training run receives one signal directly, at any depth. The processes in between (shells, `timeout`, `mpirun`)
//! receive none, and end as usual when the training run has ended. If there is no process of this program, the
//! command's whole process group receives the signal instead, as from a terminal. A process whose parent is ended by
//! the signal receives it at the next check.
//!
//! A script may continue for a short time after its training run. If it takes longer, the process group receives the
//! signal after all. A process that survives the signal must have trapped it, and receives nothing more until the user
//! sends another signal. After a second signal, all processes have a short time to end, and are then killed.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGKILL, SIGQUIT, SIGTERM};

use super::signals::Order;
use crate::console;
use crate::process::Process;

/// Time for a script to end after its training run was asked to end, and for all processes to end after a second
/// signal. Schedulers wait longer between a signal and a kill.
const GRACE: Duration = Duration::from_secs(5);

/// The processes below `launch`.
#[derive(Debug)]
pub(super) struct Below {
    /// The id of the command's first process, and of its process group.
    first: u32,
    /// The start time of that process, if the system reports it.
    started: Option<u64>,
    /// An entry in the environment of all these processes.
    entry: String,
    /// The last order passed on to them.
    order: Option<Order>,
    /// The processes that received the order, by id and start time.
    told: HashSet<(u32, u64)>,
    /// The processes that received the order and that `launch` waits for.
    awaited: Vec<Process>,
    /// True once the process group has received the order.
    is_group_told: bool,
    /// The processes of other programs that existed when the order came.
    known: HashSet<Image>,
    /// The time when no training run was left after the order; `None` while there is one.
    over_since: Option<Instant>,
    /// The time of the first order to end at once.
    at_once_since: Option<Instant>,
    /// True once the remaining processes were killed.
    has_killed: bool,
}

/// A process and the program that it runs. A shell may replace itself with its last command.
type Image = (u32, u64, Option<PathBuf>);

/// The processes that exist at one moment.
struct Seen {
    /// Processes of this program that are not below another one.
    own: Vec<Process>,
    others: Vec<Process>,
}

/// The counts of processes that a command left behind.
pub(super) struct Left {
    /// The number of processes to wait for: those of this program, and those that received the order.
    pub(super) num_awaited: usize,
    /// True if there are processes of other programs.
    pub(super) has_others: bool,
}

impl Below {
    /// Creates the record for a command, with its first process and a variable in its environment.
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

    /// Passes a new order on to the training runs. Without a training run, or if the order is to end at once, also
    /// passes it on to the process group.
    pub(super) fn obey(&mut self, order: Order) {
        self.order = Some(order);
        let is_at_once = matches!(order, Order::AtOnce(_));
        if is_at_once {
            // Notify all of them again, and wait only for training runs.
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

    /// Passes an existing order on to processes that did not exist before or that have lost their parent. Some time
    /// after an order to end at once, kills all that remain.
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
        // A script that starts the next training run or a long command after a training run was asked to end must
        // receive the order itself.
        if (trains_on || !late.is_empty()) && !self.is_group_told {
            self.is_group_told = true;
            self.tell_group(&seen);
            // Late processes and the shell above them may be in another group.
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

    /// Returns true if an order was passed on.
    pub(super) fn has_order(&self) -> bool {
        self.order.is_some()
    }

    /// Counts the processes that the command left behind.
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
            // A chain is at most as long as the number of processes.
            let up = std::iter::successors(parent(of), |process| parent(process));
            up.take(all.len()).take_while(|process| process.id != this)
        };
        // If the whole group has ended, another process may have its id.
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
        // A `launch` below passes the order on to the processes below itself.
        let ids: HashSet<_> = own.iter().map(|own| own.id).collect();
        own.retain(|own| !above(own).any(|up| ids.contains(&up.id)));
        Seen { own, others }
    }

    /// Returns processes that were started after the order and still exist some time after the end of the training
    /// runs. Older processes may be waiting for training runs on other machines, as `mpirun` does.
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

    /// Kills all remaining processes.
    fn kill(&mut self, seen: &Seen) {
        let left: Vec<_> = seen.own.iter().chain(&seen.others).collect();
        if !left.is_empty() && !std::mem::replace(&mut self.has_killed, true) {
            console::tell(format_args!(
                "warning: killing {} processes that did not end when told to end at once",
                left.len()
            ));
        }
        left.into_iter().for_each(|left| send(SIGKILL, left));
    }

    /// Returns true for a process in another process group whose parent is not below `launch`, or no longer exists.
    fn is_orphan(&self, process: &Process, seen: &Seen) -> bool {
        let is_parent = |other: &Process| other.id == process.parent;
        process.group != self.first && !seen.own.iter().chain(&seen.others).any(is_parent)
    }

    /// Passes the order on to processes of this program. Returns true if one of them had not received it.
    fn tell_own(&mut self, seen: &Seen) -> bool {
        let before = self.told.len();
        seen.own.iter().for_each(|own| self.tell(own));
        self.told.len() > before
    }

    /// Passes the order on to a process that has not received it.
    fn tell(&mut self, process: &Process) {
        let (signal, is_awaited) = match self.order {
            Some(Order::AtOnce(_)) if process.is_of_this_program() => (SIGQUIT, true),
            Some(Order::AtOnce(signal)) => (signal, false),
            // Shells make background processes ignore SIGINT. A process that ignores SIGHUP should outlive a terminal.
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

    /// Passes the order on to the command's process group, if it has a member. This is the only way if the system lists
    /// no processes.
    fn tell_group(&mut self, seen: &Seen) {
        let Some(Order::End(signal) | Order::AtOnce(signal)) = self.order else {
            return;
        };
        let is_member = |process: &&Process| process.group == self.first;
        let members: Vec<_> = seen.others.iter().filter(is_member).copied().collect();
        let is_listed = Process::find(std::process::id()).is_some();
        if !is_listed || !members.is_empty() {
            // The last member may have ended in the meantime.
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

/// Returns true if the grace period since that time is over.
fn is_over(since: Option<Instant>) -> bool {
    since.is_some_and(|since| since.elapsed() >= GRACE)
}

fn image(process: &Process) -> Image {
    let program = fs::read_link(format!("/proc/{}/exe", process.id));
    (process.id, process.started, program.ok())
}

/// Sends a signal to a process, and prints a warning if this fails.
fn send(signal: i32, process: &Process) {
    if !kill(signal, &process.id.to_string()) && process.is_alive() {
        console::tell(format_args!(
            "warning: cannot send signal {signal} to process {}",
            process.id
        ));
    }
}

/// Returns true if the signal was sent. The standard library can only send SIGKILL, but every shell can send any
/// signal.
fn kill(signal: i32, target: &str) -> bool {
    let line = format!("kill -{signal} {target} 2>/dev/null");
    let sent = Command::new("sh").args(["-c", &line]).status();
    sent.is_ok_and(|status| status.success())
}
