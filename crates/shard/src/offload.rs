//! Keeps shards on the host, and full parameters on the computing device.

use burn::tensor::Device;
use burn_fsdp_tensors as tensors;

use crate::error::Error;
use crate::policy::ShardPolicy;

/// The devices of an offloaded unit, both without autodiff.
#[derive(Debug, Clone)]
pub(crate) struct Offload {
    /// The device of shards, their gradients, and therefore the optimizer's state.
    pub(crate) host: Device,
    /// The device of full parameters and activations at the time of sharding.
    pub(crate) compute: Device,
}

impl Offload {
    /// Returns the devices that `policy` selects for a unit whose module was built on `device`; `None` if it does not
    /// offload, or `device` is its host.
    ///
    /// # Errors
    ///
    /// [`Error::Option`] if the policy's host is not the CPU backend.
    pub(crate) fn new(policy: &ShardPolicy, device: &Device) -> Result<Option<Self>, Error> {
        let Some(host) = &policy.offload else {
            return Ok(None);
        };
        if !tensors::is_host(host) {
            return Err(Error::Option {
                option: "offload_to",
                expected: "the CPU backend, `Device::flex()`",
                got: format!("{host:?}"),
            });
        }
        let offload = Self {
            host: host.clone().without_autodiff(),
            compute: device.clone().without_autodiff(),
        };
        Ok((offload.host != offload.compute).then_some(offload))
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::Offload;
    use crate::policy::ShardPolicy;

    /// The test uses a device that is not a CPU backend, and needs only its identity.
    #[test]
    fn shards_are_on_the_host_and_weights_on_the_modules_device() {
        let policy = ShardPolicy::new().offload_to(Device::flex());
        let elsewhere = Device::capture();
        let offload = Offload::new(&policy, &elsewhere).expect("a host");
        let offload = offload.expect("the module is not on it");
        assert_eq!(offload.host, Device::flex());
        assert_eq!(offload.compute, elsewhere);
        let on_host = Offload::new(&policy, &Device::flex().autodiff());
        assert!(on_host.expect("a host").is_none());
        let without = Offload::new(&ShardPolicy::new(), &elsewhere);
        assert!(without.expect("no host").is_none());
    }
}
