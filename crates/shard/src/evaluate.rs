//! Evaluation in which ranks may take different routes through a module.

use burn::module::Module;

use crate::error::Error;
use crate::inspect;
use crate::root::{Evaluable, Evaluation, are_equal};
use crate::thrown::catch;

/// Evaluates a sharded module: passes its [`valid`](Module::valid) copy, without autodiff, to `body`, and returns the
/// result. As in training, ranks may take different routes through it: experts chosen by a router, skipped layers,
/// different numbers of batches. (Outside this function, a [`Module::valid`] copy needs the same units in the same
/// order on all ranks.)
///
/// Before each gather, ranks exchange which unit they need. Ranks that need another unit, or have finished, still send
/// their shards. So a rank that has finished waits for the others; between gathers, the group's deadline limits the
/// wait. `body` must not call any other collective; let it return values, and sum them over ranks afterwards.
///
/// Collective: all ranks of the module call it, between steps. It costs one exchange of 4 bytes before each gather, and
/// one at the end.
///
/// # Errors
///
/// - [`Error::NotSharded`].
/// - [`Error::State`] if evaluations are nested, if `body` uses another copy of the module than the one it received, or
///   if another rank fails.
/// - [`Error::Option`] for a module whose units are sharded over several groups.
/// - A failed collective.
///
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_fsdp_shard::{Error, ShardPolicy, evaluate, fully_shard};
/// # use burn_fsdp_collectives::{LaunchConfig, launch};
///
/// #[derive(Module, Debug)]
/// struct Experts { experts: Vec<Linear> }
///
/// # launch(LaunchConfig::new(2), |world| {
/// let device = Device::flex().autodiff().gradient_checkpointing();
/// let linear = LinearConfig::new(8, 8);
/// let model = Experts { experts: (0..4).map(|_| linear.init(&device)).collect() };
/// let model = fully_shard(model, &world, ShardPolicy::new().units(["experts.*"]))?;
/// let batch = Tensor::<2>::ones([2, 8], &Device::flex());
/// let out = evaluate(&model, |model| model.experts[world.rank()].forward(batch))?;
/// # let _ = out;
/// # Ok::<_, Error>(())
/// # }).unwrap();
/// ```
pub fn evaluate<M: Module, T>(module: &M, body: impl FnOnce(&M) -> T) -> Result<T, Error> {
    let root = inspect::root_of(module)?;
    let copy = catch(|| module.valid())?;
    let mut units: Vec<Evaluable> = Vec::new();
    for member in inspect::members(&copy) {
        // A unit has several values if a part of the module was cloned or changed separately.
        let values = member.values();
        let is_known = |(_, known): &Evaluable| are_equal(known, &values);
        if values.unit.is_gathered() && !units.iter().any(is_known) {
            let root = member.root_link().root().ok_or(Error::NotSharded)?;
            units.push((root, values));
        }
    }
    let evaluation = Evaluation::begin(&root, units)?;
    match catch(|| body(&copy)) {
        Ok(evaluated) => evaluation.finish().map(|()| evaluated),
        Err(error) => {
            evaluation.fail();
            Err(error)
        }
    }
}
