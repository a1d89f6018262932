//! Tests whose requirements a machine may lack. They print that they were skipped, or fail if nothing may be skipped.
#![allow(dead_code, reason = "every test uses another part of this")]

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// Reports that the calling test returns without having tested anything.
///
/// It does not use `println!`, because the test harness shows that output only for failed tests.
///
/// # Panics
///
/// If `BURN_FSDP_NO_SKIPS` is set. The nightly run sets it because it installs everything that the tests need.
pub(crate) fn skipped(reason: &str) {
    let test = std::thread::current();
    let text = format!("SKIPPED {}: {reason}\n", test.name().unwrap_or("a test"));
    assert!(
        std::env::var_os("BURN_FSDP_NO_SKIPS").is_none(),
        "nothing may be skipped here: {text}"
    );
    let _ = std::io::stderr().write_all(text.as_bytes());
}

/// Returns a Python that can import these packages: `BURN_FSDP_PYTHON`, or the system's Python. Prints a notice and
/// returns `None` if there is none.
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
