//! Warnings that are visible even if the program sets up no logging.

/// Reports `message` through `tracing`, and on standard error if no subscriber was set.
pub(crate) fn warn(message: impl std::fmt::Display) {
    tracing::warn!(target: "burn_fsdp", "{message}");
    if !tracing::dispatcher::has_been_set() {
        eprintln!("burn-fsdp: {message}");
    }
}
