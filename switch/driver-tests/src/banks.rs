//! The registers that `cpu_state.c` keeps in banks: their order, and the room for them.

const SOURCE: &str = include_str!("../../driver/snapshot/cpu_state.c");

/// Returns the banks in the order in which they are written: the name of the first register, and the largest
/// number of registers.
fn banks() -> Vec<(&'static str, usize)> {
    let calls = SOURCE.split("add_bank(").skip(1);
    let bank = |call: &'static str| {
        let (arguments, _) = call.split_once(";")?;
        let (name, count) = arguments.trim_end_matches(')').split_once(", ")?;
        // Either a number, or `classes(leaf, resource, most)`.
        let most = count.rsplit(", ").next()?;
        Some((name, most.parse().ok()?))
    };
    // The function itself is no call.
    calls.filter(|call| !call.starts_with("u32 ")).map(|call| bank(call).expect("a bank")).collect()
}

fn limit(name: &str) -> usize {
    let line = SOURCE.lines().find(|line| line.starts_with(&format!("#define {name}"))).expect("a limit");
    line.split_whitespace().last().expect("a number").parse().expect("a number")
}

/// `add_bank` leaves out what has no room, so all must have room, on a processor with everything.
#[test]
fn each_bank_has_room() {
    let banks = banks();
    assert_eq!(banks.len(), 15, "{banks:?}");
    let registers: usize = banks.iter().map(|(_, count)| count).sum();
    assert!(registers <= limit("BANKED_MAX"), "{registers}");
}

/// The way in which a cache is divided, and the switch of requests, change the meaning of what comes after.
#[test]
fn what_gives_others_a_meaning_comes_first() {
    let banks = banks();
    let place = |wanted: &str| banks.iter().position(|(name, _)| *name == wanted).expect(wanted);
    for (first, then) in
        [("L3_QOS_CFG", "L3_MASKS"), ("L2_QOS_CFG", "L2_MASKS"), ("MSR_AMD_CPPC_ENABLE", "MSR_AMD_CPPC_REQ")]
    {
        assert!(place(first) < place(then), "{first}");
    }
}
