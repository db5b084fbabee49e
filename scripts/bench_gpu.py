from benchmarks.bench_gpu import main

raise SystemExit(main())
