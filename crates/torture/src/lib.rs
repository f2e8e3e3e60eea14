//! Composed faults against real stores: client processes take and lose locks while faults hit them,
//! their network and the servers, and a checker compares what they saw with what a lock promises.

pub mod bug;
pub mod check;
pub mod client;
pub mod command;
pub mod history;
pub mod journal;
pub mod nemesis;
pub mod plan;
pub mod process;
pub mod random;
pub mod recorded;
pub mod register;
pub mod report;
pub mod resource;
pub mod run;
pub mod script;
pub mod store;
