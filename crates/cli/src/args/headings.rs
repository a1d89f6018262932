//! Help headings that several commands share.

/// The heading of flags about ranks and devices.
pub(super) const DEVICES: &str = "Devices and sharding";

/// The heading of flags that start from another model.
pub(super) const FINE_TUNING: &str = "Fine-tuning";

/// The heading of flags that trade memory, speed and precision.
pub(super) const MEMORY: &str = "Memory and speed";

/// The heading of flags that show how a run works.
pub(super) const DIAGNOSTICS: &str = "Diagnostics";
