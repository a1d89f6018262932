//! The eager engine compared with one rank without sharding, with ranks as threads; some tests also run as
//! processes.

mod accumulate;
mod all_reduce_hook;
mod audit;
mod bench;
mod composable;
mod counts;
mod gather_hook;
mod hybrid;
#[path = "../../../collectives/tests/launcher/mod.rs"]
mod launcher;
mod lifecycle;
mod nests;
mod nets;
mod parity;
mod passes;
mod precision;
mod prefetch;
mod recompute;
mod records;
mod reduction_hook;
mod refusals;
mod repeatable;
mod routes;
mod selected;
mod shares;
#[path = "../../../collectives/tests/skipped/mod.rs"]
mod skipped;
mod states;
mod stepping;
mod switches;
mod unused;
mod valid;
mod warnings;
