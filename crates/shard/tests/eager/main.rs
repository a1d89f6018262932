//! The eager engine against one rank without sharding, ranks as threads.

mod bench;
mod counts;
mod lifecycle;
mod nets;
mod parity;
mod records;
mod refusals;
mod unused;
