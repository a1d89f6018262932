//! Tests that need what a machine may lack: they say aloud that they were skipped, or fail where nothing may be.
#![allow(dead_code, reason = "every test uses another part of this")]

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// Says that the test which calls this returns without having tested anything.
///
/// Not by `println!`, which the test harness shows of failed tests alone.
///
/// # Panics
///
/// Where `BURN_FSDP_NO_SKIPS` is set, as the nightly run sets it: what it installs has to be there.
pub(crate) fn skipped(reason: &str) {
    let test = std::thread::current();
    let text = format!("SKIPPED {}: {reason}\n", test.name().unwrap_or("a test"));
    assert!(
        std::env::var_os("BURN_FSDP_NO_SKIPS").is_none(),
        "nothing may be skipped here: {text}"
    );
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// A Python that can import these packages: `BURN_FSDP_PYTHON`, or the one of the system. `None` where there is none, after
/// saying so.
pub(crate) fn python(packages: &str) -> Option<PathBuf> {
    let python = std::env::var_os("BURN_FSDP_PYTHON").unwrap_or_else(|| "python3".into());
    let import = format!("import {packages}");
    let found = Command::new(&python).args(["-c", &import]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return Some(python.into());
    }
    skipped(&format!(
        "{} cannot import {packages}; BURN_FSDP_PYTHON names another Python",
        python.display()
    ));
    None
}
