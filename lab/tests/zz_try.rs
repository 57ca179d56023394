use mercury_lab::{
    kernel::Kernel,
    machine::Machine,
    spec::{Icount, Spec},
};
#[test]
fn counts() {
    let m = Machine::boot(Spec::new(Kernel::BookwormCloud).cpus(1).icount(Icount::Exact)).unwrap();
    let o = m.run("mercury load; mercury bench switch --cycles 20; mercury bench switch --cycles 20 --json; mercury attach; mercury status; dmesg | tail -3").unwrap();
    println!("{}", o.stdout);
    println!("{}", o.stderr);
}
