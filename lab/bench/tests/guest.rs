//! The cost of a database in a machine that has become a guest.

use mercury_lab::{Platform, Result, Vendor};
use mercury_lab_bench::guest::database;

#[test]
#[ignore = "long"]
fn a_database_costs_as_much_as_in_an_ordinary_guest() -> Result<()> {
    Platform::need(Vendor::Amd, "the lab has no host with KVM on Intel")?;
    let database = database::measure(2)?;
    println!("{database:?}");
    assert!(database.arrived_over_ordinary >= 0.95, "{database:?}");
    Ok(())
}
