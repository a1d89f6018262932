//! The processes of this machine, if the system lists them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A snapshot of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) id: u32,
    pub(crate) parent: u32,
    /// The id of its process group.
    pub(crate) group: u32,
    /// Start time of the process, in ticks of the machine's clock. It distinguishes the process from a later one with
    /// the same id.
    pub(crate) started: u64,
}

impl Process {
    /// Finds a process by its id; `None` if it has ended, or if the system does not list processes.
    pub(crate) fn find(id: u32) -> Option<Self> {
        // A process name may contain any bytes.
        let text = fs::read(format!("/proc/{id}/stat")).ok()?;
        let text = String::from_utf8_lossy(&text);
        // `1 (any name) S 2 3 ..`
        let (_, fields) = text.rsplit_once(')')?;
        let fields: Vec<_> = fields.split_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        // A process that has ended stays in the list until its parent asks for its exit code.
        let has_ended = matches!(*fields.first()?, "Z" | "X" | "x");
        (!has_ended).then_some(Self {
            id,
            parent: number(1)?.try_into().ok()?,
            group: number(2)?.try_into().ok()?,
            started: number(19)?,
        })
    }

    /// Lists all processes that are visible to this one.
    pub(crate) fn all() -> Vec<Self> {
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        ids.filter_map(Self::find).collect()
    }

    /// Returns true if this same process still exists.
    pub(crate) fn is_alive(&self) -> bool {
        Self::find(self.id).is_some_and(|now| now.started == self.started)
    }

    /// Returns true if the process was started with this entry, `NAME=value`, in its environment.
    pub(crate) fn has_in_environment(&self, entry: &str) -> bool {
        let all = fs::read(format!("/proc/{}/environ", self.id)).unwrap_or_default();
        all.split(|byte| *byte == 0)
            .any(|own| own == entry.as_bytes())
    }

    /// Returns true if the process runs the same program as this one.
    pub(crate) fn is_of_this_program(&self) -> bool {
        let [other, own] = [
            format!("/proc/{}/exe", self.id),
            "/proc/self/exe".to_owned(),
        ];
        let file = |path: &String| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
        if let (Some(other), Some(own)) = (file(&other), file(&own))
            && other == own
        {
            return true;
        }
        // The file may have been rebuilt or copied in the meantime.
        let name = |path: &String| {
            let path = fs::read_link(path).ok()?;
            let name = path.file_name()?.to_str()?;
            Some(name.trim_end_matches(" (deleted)").to_owned())
        };
        name(&other).is_some_and(|other| Some(other) == name(&own))
    }

    /// Lists this process, its ancestors, its process group, and all processes of this program. Any of them may print
    /// the output of a run or write it to a file.
    pub(crate) fn of_this_run() -> Vec<Self> {
        let all = Self::all();
        let find = |id: u32| all.iter().find(|process| process.id == id);
        let Some(this) = find(std::process::id()) else {
            return Vec::new();
        };
        // A chain is at most as long as the number of processes.
        let above = std::iter::successors(Some(this), |process| find(process.parent));
        let above: Vec<_> = above.take(all.len()).map(|process| process.id).collect();
        let is_of_run = |process: &&Self| {
            process.group == this.group
                || above.contains(&process.id)
                || process.is_of_this_program()
        };
        all.iter().filter(is_of_run).copied().collect()
    }

    /// Returns the files that the process has open for writing, as far as this process can see them.
    pub(crate) fn written(&self) -> Vec<fs::Metadata> {
        let folder = format!("/proc/{}", self.id);
        let entries = fs::read_dir(format!("{folder}/fd")).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let is_written = |name: &String| {
            let info = fs::read_to_string(format!("{folder}/fdinfo/{name}")).unwrap_or_default();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
            let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
            // 0 means read-only.
            flags.is_some_and(|flags| flags & 3 != 0)
        };
        let written = names.filter(is_written);
        let files = written.filter_map(|name| fs::metadata(format!("{folder}/fd/{name}")).ok());
        files.collect()
    }

    /// Returns true if the process ignores a signal.
    pub(crate) fn ignores(&self, signal: i32) -> bool {
        ignores(&self.id.to_string(), signal)
    }
}

/// Returns true if this process ignores a signal, for example SIGHUP under `nohup`.
pub(crate) fn is_ignored(signal: i32) -> bool {
    ignores("self", signal)
}

/// Returns an identity of this machine, its boot, and the set of processes visible to this one. Two processes with the
/// same identity see each other. `None` if the system does not provide it.
pub(crate) fn machine() -> Option<String> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let seen = fs::read_link("/proc/self/ns/pid").ok()?;
    Some(format!("{} {}", boot.trim(), seen.display()))
}

fn ignores(process: &str, signal: i32) -> bool {
    let path = Path::new("/proc").join(process).join("status");
    let status = fs::read_to_string(path).unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::{Command, Stdio, id};

    use super::*;

    #[test]
    fn broken_pipes_are_ignored_and_kills_are_not() {
        // Rust's runtime ignores SIGPIPE, 13.
        assert!(is_ignored(13));
        assert!(!is_ignored(9));
    }

    #[test]
    fn a_process_is_found_until_it_has_ended() {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).env("BURN_FSDP_TEST", "a b");
        let mut child = command.spawn().expect("cat starts");
        let found = Process::find(child.id()).expect("it waits for its input");
        assert_eq!(found.parent, id());
        assert!(Process::all().contains(&found));
        assert!(found.is_alive());
        // The environment is complete only once the program has started.
        while !found.has_in_environment("BURN_FSDP_TEST=a b") {
            assert!(found.is_alive());
        }
        assert!(!found.has_in_environment("BURN_FSDP_TEST=a"));
        assert!(!found.is_of_this_program());
        assert!(Process::of_this_run().contains(&found));
        assert!(found.written().iter().all(|file| !file.is_dir()));
        drop(child.stdin.take());
        // The process has ended when its output is closed. Nobody has asked for its exit code yet.
        while found.is_alive() {
            std::thread::yield_now();
        }
        assert_eq!(Process::find(found.id), None);
        child.wait().expect("an end");
        let own = Process::find(id()).expect("this one");
        assert!(own.is_of_this_program());
    }
}
