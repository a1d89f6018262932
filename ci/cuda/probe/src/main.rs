//! Proves, on a machine with a CUDA device, the ways into CubeCL's memory and streams that the engines use.
//!
//! `probe SECTION` runs one section in this process; each prints lines that begin with `RESULT`. A section is a process,
//! so that one that fails or hangs does not stop the others.
mod events;
mod graph;
mod host;
mod kernels;
mod lab;
mod lt;
mod memory;
mod nccl;
mod products;
mod route;
mod shared;

use std::process::ExitCode;

const SECTIONS: &str = "products, events, shared, nccl, graph, host, memory";

fn main() -> ExitCode {
    let name = std::env::args().nth(1).unwrap_or_default();
    // SAFETY: looks for the driver's library by its names and loads it.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        eprintln!("no CUDA on this machine: libcuda.so was not found (LD_LIBRARY_PATH)");
        return ExitCode::from(2);
    }
    let devices =
        cudarc::driver::result::init().and_then(|()| cudarc::driver::result::device::get_count());
    if !matches!(devices, Ok(1..)) {
        eprintln!("no CUDA device on this machine: the driver says {devices:?}");
        return ExitCode::from(2);
    }
    let section = match name.as_str() {
        "products" => products::run,
        "events" => events::run,
        "shared" => shared::run,
        "nccl" => nccl::run,
        "graph" => graph::run,
        "host" => host::run,
        "memory" => memory::run,
        _ => {
            eprintln!("usage: probe SECTION, one of: {SECTIONS}");
            return ExitCode::from(64);
        }
    };
    allow_debugger();
    lab::step("opening the device");
    let outcome = lab::Lab::open()
        .map_err(Into::into)
        .and_then(|lab| section(&lab));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("RESULT {name} FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Lets any process of this user look at the stacks of this one, as `on_device.sh` does when a section runs out of time.
fn allow_debugger() {
    unsafe extern "C" {
        fn prctl(option: i32, value: usize, a: usize, b: usize, c: usize) -> i32;
    }
    const PR_SET_PTRACER: i32 = 0x59_61_6d_61;
    // SAFETY: no pointers. A kernel without this restriction answers with an error, which changes nothing.
    let _ = unsafe { prctl(PR_SET_PTRACER, usize::MAX, 0, 0, 0) };
}
