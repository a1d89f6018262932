//! The operating system's memory figures, and the machine's name.

use std::fs;
use std::path::Path;

/// Returns the bytes of memory that this process may use, if the system reports them. This is its part of the machine's
/// memory, which it shares with the run's other processes. Control groups and limits of the process (`ulimit -v`,
/// `ulimit -d`) can lower it.
pub(crate) fn memory_bytes(processes_here: usize) -> Option<u64> {
    let shared = |bytes: u64| bytes / processes_here.max(1) as u64;
    let machine = field("/proc/meminfo", "MemTotal:").map(|kib| kib.saturating_mul(1024));
    let limits = ["Max address space", "Max data size"];
    let own = limits.map(|name| field("/proc/self/limits", name));
    let of_all = cgroup_limits().into_iter().chain([machine]);
    own.into_iter()
        .chain(of_all.map(|limit| limit.map(shared)))
        .flatten()
        .min()
}

/// Returns the peak resident bytes of this process, if the system reports them.
pub(crate) fn peak_rss_bytes() -> Option<u64> {
    field("/proc/self/status", "VmHWM:").map(|kib| kib.saturating_mul(1024))
}

/// Returns the resident bytes of this process, if the system reports them.
pub(crate) fn rss_bytes() -> Option<u64> {
    field("/proc/self/status", "VmRSS:").map(|kib| kib.saturating_mul(1024))
}

/// Returns the name of this machine.
pub(crate) fn name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.or_else(|| std::env::var("HOSTNAME").ok());
    name.map_or_else(|| "unknown".to_owned(), |name| name.trim().to_owned())
}

/// Returns the number in a line of a file such as `VmHWM:  1234 kB`; `None` for a value such as `unlimited`.
fn field(path: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Lists the limits of the control groups that this process is in, and of their parents. Supports both versions of
/// control groups.
fn cgroup_limits() -> Vec<Option<u64>> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let mut limits = Vec::new();
    for line in groups.lines() {
        // `0::/path` in version 2, `4:memory:/path` in version 1.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            list if list.split(',').any(|controller| controller == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        // In a container, the path may be the host's, and only the root exists.
        for above in Path::new(path.trim_start_matches('/')).ancestors() {
            let limit = fs::read_to_string(Path::new(root).join(above).join(file));
            limits.push(limit.ok().and_then(|limit| limit.trim().parse().ok()));
        }
    }
    limits
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_memory_is_at_most_the_machines() {
        let machine = field("/proc/meminfo", "MemTotal:").expect("a machine with memory") * 1024;
        let usable = memory_bytes(1).expect("some");
        assert!(usable > 0 && usable <= machine, "{usable} of {machine}");
        assert!(peak_rss_bytes().is_some_and(|peak| peak > 0 && peak < machine));
    }
}
