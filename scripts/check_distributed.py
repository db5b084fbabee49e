from rl.commands.check_distributed import main

raise SystemExit(main())
