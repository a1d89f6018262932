//! Compiled steps on backends other than Flex, compared with Burn's own loop, and their checkpoints, which both engines
//! continue on any backend. NdArray is the second backend of every test run. `ci/gpu.sh` runs the same tests on wgpu.
#![cfg(any(feature = "ndarray", feature = "wgpu"))]

#[path = "../common/save.rs"]
mod saving;

mod backends;
mod moves;
mod runs;
mod trains;

/// Runs the tests on one backend.
macro_rules! on {
    ($name:ident, $backend:ty) => {
        mod $name {
            #[test]
            fn compiled_steps_train_like_burn() {
                crate::trains::train_like_burn::<$backend>();
            }

            #[test]
            fn compiled_steps_resume_bit_for_bit() {
                crate::moves::resume_bit_for_bit::<$backend>();
            }

            #[test]
            fn compiled_steps_restore_steps_of_other_backends_and_engines() {
                crate::moves::restore_steps_of_others::<$backend>();
            }

            #[test]
            fn compiled_steps_continue_runs_of_other_backends_and_engines() {
                crate::moves::continue_runs_of_others::<$backend>();
            }

            #[test]
            fn compiled_steps_pass_weights_to_sharded_models_on_any_backend() {
                crate::moves::pass_weights::<$backend>();
            }

            #[test]
            fn compiled_steps_start_from_values_that_ranks_read() {
                crate::trains::start_from_values::<$backend>();
            }

            #[test]
            fn compiled_steps_count_their_copies() {
                crate::trains::count_copies::<$backend>();
            }
        }
    };
}

#[cfg(feature = "ndarray")]
on!(ndarray, crate::backends::NdArray);
#[cfg(feature = "wgpu")]
on!(wgpu, burn::backend::Cube);

#[test]
fn compiled_steps_on_the_cpu_copy_nothing() {
    trains::count_copies::<burn::backend::Flex>();
}
