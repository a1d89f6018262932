//! Which parameters belong together.

/// The unit of a parameter: the module whose parameters are gathered, freed and reduced together.
///
/// It is the path up to the first number, such as `blocks.3` for `blocks.3.fc.weight`, or else the first
/// name, such as `head` for `head.weight`; nothing for a parameter of the module itself.
///
/// ```
/// use burn_fsdp_spmd::passes::unit_of;
///
/// assert_eq!(unit_of("blocks.3.fc.weight"), "blocks.3");
/// assert_eq!(unit_of("model.layers.0.norm.gamma"), "model.layers.0");
/// assert_eq!(unit_of("head.weight"), "head");
/// assert_eq!(unit_of("weight"), "");
/// ```
pub fn unit_of(path: &str) -> &str {
    let mut end = 0;
    for name in path.split('.') {
        let start = end;
        end += name.len() + usize::from(start > 0);
        let next = end.min(path.len());
        if !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit()) {
            return &path[..next];
        }
    }
    path.split_once('.').map_or("", |(first, _)| first)
}
