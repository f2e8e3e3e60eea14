//! A run of half a minute per store, for `cargo xtask mutants torture`: bugs that are planted in
//! scripts and statements must be found. CI tortures every store without these tests.

use std::process::Command;

use test_support::TempDir;

fn keeps_its_promises(store: &str) {
    let directory = TempDir::new();
    let out = directory.path().display().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_torture"));
    command.args([store, "--seconds", "30", "--seed", "1", "--out", &out]);
    let output = command.output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
}

macro_rules! stores {
    ($($test:ident $store:literal),+) => {
        $(
            #[test]
            #[ignore = "for cargo xtask mutants"]
            fn $test() {
                keeps_its_promises($store);
            }
        )+
    };
}

stores!(memory "memory", sqlite "sqlite", redis "redis", postgres "postgres", firestore "firestore");
