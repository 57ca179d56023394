//! The soak of `make soak`, shorter.

use mercury_lab::{
    Platform, Result,
    soak::{self, Plan},
};

#[test]
fn three_hundred_cycles_beneath_everything() -> Result<()> {
    soak::run(Plan { batch: 60, ..Plan::new(Platform::chosen()?, 300) })?.check()
}
