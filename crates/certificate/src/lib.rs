//! The certificate of a compiled plan: a proof, made before the plan runs, that it computes the traced step.
//!
//! [`compile`] and its variants compile steps whose plans are proved if their [`Mode`](burn_fsdp_spmd::Mode) requests
//! it. [`certify`], [`certify_at`] and [`prove`] prove plans that nothing runs. The compiler knows none of this:
//! [`lowered`] hooks into its passes.
//!
//! The README next to the code describes what is proved, the assumptions and the limits.
#![forbid(unsafe_code)]

mod base;
mod call;
mod certify;
mod compile;
mod custom;
#[cfg(test)]
mod faults;
mod field;
mod floats;
mod given;
mod lanes;
mod machine;
#[cfg(test)]
#[path = "../../spmd/tests/spmd/models.rs"]
mod models;
mod module;
#[cfg(test)]
mod mutants;
mod number;
mod numeric;
mod outcome;
mod pointwise;
mod products;
mod proof;
mod reference;
mod scalar;
mod stages;
mod tensor;
mod transport;
mod twin;

use burn_fsdp_mesh::{Clip, Mesh};
use burn_fsdp_spmd::Error;
use burn_fsdp_spmd::graph::Graph;

pub use certify::{certify, certify_at, lowered};
pub use compile::{compile, compile_from, compile_on, compile_with};
pub use proof::Certificate;
use proof::{Proof, checked_kernels};

/// Proves that the last of these graphs computes the same step as the first, with the batch divided among the ranks of
/// `mesh`. Each rank computes the loss and gradients of its own rows. The optimizer uses the mean gradients, clipped by
/// `clip` if the plan clips, and the reported loss is the mean.
///
/// The first graph is a trace of one rank. Every other graph is the result of applying a pass to the previous graph
/// ([`Pipeline::stages`](burn_fsdp_spmd::passes::Pipeline::stages)), and the last is the plan.
///
/// This function neither runs the plan nor communicates, so a single rank can prove the plan for all ranks.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::optim::AdamWConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_certificate::prove;
/// use burn_fsdp_mesh::Mesh;
/// use burn_fsdp_spmd::Strategy;
/// use burn_fsdp_spmd::passes::schedule::{self, Options};
/// use burn_fsdp_spmd::trace::{TraceConfig, trace};
///
/// let batch = Tensor::<2>::zeros([4, 3], &Device::flex());
/// let traced = trace(
///     |device: &Device| LinearConfig::new(3, 2).init(device),
///     |model: &Linear, x: Tensor<2>| model.forward(x).mean(),
///     &AdamWConfig::new().build(),
///     &batch,
///     TraceConfig::default(),
/// )?;
/// let pipeline = schedule::pipeline(3, Strategy::FullShard, &Options::default(), &[]);
/// println!("{}", prove(&pipeline.stages(traced)?, &Mesh::line("data", 3)?, None)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::NotCertified`] with the first pass that changes what the step computes.
pub fn prove(stages: &[Graph], mesh: &Mesh, clip: Option<Clip>) -> Result<Certificate, Error> {
    let proof = Proof {
        mesh,
        clip,
        joined: None,
    };
    let certificate = proof.of_passes(stages)?;
    let plans = stages.last().map(|plan| (plan, plan));
    Ok(Certificate {
        checked_in_floats: checked_kernels(plans)?,
        ..certificate
    })
}
