//! The option `--region`: memory that several machines have in common.

use std::str::FromStr;

use crate::{memory, name::Name};

/// A region's size is a multiple of this, or Linux does not take it.
const UNIT: u64 = 2;

/// A region that is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionOption {
    pub name: Name,
    pub bytes: u64,
}

impl FromStr for RegionOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, size) =
            text.split_once(',').ok_or_else(|| "a region is a name and a size: pool,64M".to_owned())?;
        let name = name.parse()?;
        let mebibytes = memory::mebibytes(size)?;
        if !mebibytes.is_multiple_of(UNIT) {
            return Err(format!("a region's size is a multiple of {UNIT} MiB"));
        }
        Ok(Self { name, bytes: mebibytes << 20 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_has_a_name_and_a_size() {
        let region: RegionOption = "pool,64M".parse().expect("a region");
        assert_eq!((region.name.as_str(), region.bytes), ("pool", 64 << 20));
        for (text, why) in [
            ("pool", "a name and a size"),
            ("pool,", "512M"),
            ("../pool,64M", "a name has"),
            ("pool,63M", "multiple of 2"),
            ("pool,64M,2", "512M"),
            ("pool,0M", "1M to 1T"),
        ] {
            let error = text.parse::<RegionOption>().expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
